"""Calls on both sides of the rules of the limits, which tests and the section `limits` make."""

from __future__ import annotations

from collections.abc import Iterator

from . import dense, prompt, scatter, sparse
from .rule import Rule


def rules() -> Iterator[Rule]:
    for module in (sparse, dense, prompt, scatter):
        yield from module.rules()


__all__ = ["Rule", "rules"]
