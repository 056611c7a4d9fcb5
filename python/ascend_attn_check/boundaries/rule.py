"""A rule of some devices, as a call that keeps it and one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    operator: str
    text: str  # of the error, which names the argument
    devices: tuple[str, ...]  # "A2:9.1"
    # Return the arguments of a call, with meta tensors.
    inside: Callable[[], dict[str, Any]]
    outside: Callable[[], dict[str, Any]]
