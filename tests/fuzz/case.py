"""What a class of cases is."""

from __future__ import annotations

import random
from collections.abc import Callable


class Finding(AssertionError):
    """What a case found; its text is one paragraph."""


# Makes and checks one random case, from nothing but the generator; returns a short label of what it
# exercised, for the counts, and raises a Finding.
Case = Callable[[random.Random], str]
