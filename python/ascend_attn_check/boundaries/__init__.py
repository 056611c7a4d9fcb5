"""Calls on both sides of the rules of the limits, which tests and the section `limits` make."""

from __future__ import annotations

from collections.abc import Iterator

from . import compressed, dense, infer, prompt, scatter, sparse
from .rule import Rule


def rules() -> Iterator[Rule]:
    for module in (sparse, compressed, dense, prompt, infer, scatter):
        yield from module.rules()


__all__ = ["Rule", "rules"]
