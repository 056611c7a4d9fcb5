"""Choices by turns cover every value soon, and every pair of values always."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support import turns
from support.samples import RECIPES

SEEDS = range(20)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CALLS = [{"recipe": r, "dtype": d} for r, d in product(RECIPES, DTYPES)]


@pytest.mark.parametrize("share", [4, 16])
def test_every_choice_has_every_pair(share: int) -> None:
    kinds = [
        {(r.operator.name, d), (r.operator.name, r.layout), (r.operator.name, mode)}
        for r, d in product(RECIPES, DTYPES)
        for mode in [f"mode {getattr(r.case, 'mode', None)}"]
    ]
    for seed in SEEDS:
        chosen = turns.choose("test", CALLS, share, seed)
        assert set().union(*(kinds[i] for i in chosen)) == set().union(*kinds), seed
        assert len(CALLS) / share <= len(chosen) < len(CALLS) / share + 200


@pytest.mark.parametrize("share", [4, 16])
def test_consecutive_seeds_run_everything(share: int) -> None:
    chosen = [set(turns.choose("test", CALLS, share, seed)) for seed in SEEDS]
    assert set().union(*chosen[:share]) == set(range(len(CALLS)))
    assert len({frozenset(x) for x in chosen}) == len(SEEDS)


def test_without_operators_every_pair_of_short_axes() -> None:
    parameters = [{"a": a, "b": b, "long": i} for a in range(3) for b in "xyz" for i in range(40)]
    chosen = turns.choose("test", parameters, 60, 7)
    assert {(parameters[i]["a"], parameters[i]["b"]) for i in chosen} == set(
        product(range(3), "xyz")
    )
    assert len(chosen) < 20
