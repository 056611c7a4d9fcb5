"""The type of a class of cases, and of its findings."""

from __future__ import annotations

import random
from collections.abc import Callable


class Finding(AssertionError):
    """A finding of a case; its text is one paragraph."""


# Makes and checks one random case, from nothing but the generator; returns a short label of what it
# exercised, for the counts, and raises a Finding.
Case = Callable[[random.Random], str]
