"""Choices by turns cover every value soon, and every pair of values always; a bound on sums."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from ascend_attn_ops.reference.bounds.expected import OF_TERMS, within
from support import turns
from support.samples import RECIPES
from support.tolerance import Tolerance, assert_close
from torch import Tensor

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
    assert len({frozenset(x) for x in chosen}) >= share


def test_without_operators_every_pair_of_short_axes() -> None:
    parameters = [{"a": a, "b": b, "long": i} for a in range(3) for b in "xyz" for i in range(40)]
    chosen = turns.choose("test", parameters, 60, 7)
    assert {(parameters[i]["a"], parameters[i]["b"]) for i in chosen} == set(
        product(range(3), "xyz")
    )
    assert len(chosen) < 20


# The bound on sums that nearly cancel, for sums whose exact value is known.

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
SUMMANDS, COLUMNS = 16, 32


def summands() -> Tensor:
    """In float64, each about 1000, with a sum below 1."""
    generator = torch.Generator().manual_seed(0)
    half = 1000 + torch.rand(SUMMANDS // 2, COLUMNS, generator=generator, dtype=torch.float64)
    rest = 0.1 * torch.rand(half.shape, generator=generator, dtype=torch.float64)
    return torch.cat([half, rest - half])


def check(got: Tensor, dtype: torch.dtype, with_floor: bool = True) -> None:
    x = summands()
    exact, size = x.sum(0), x.abs().sum(0)
    floor = within("sum", exact, size, dtype).allowed if with_floor else 0.0
    assert_close("sum", got, exact, Tolerance(OF_TERMS[dtype], OF_TERMS[dtype]), floor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_summands_may_be_rounded(dtype: torch.dtype) -> None:
    """Without their size the bound is smaller than one rounding of each."""
    rounded = summands().to(dtype).double().sum(0)
    check(rounded, dtype)
    with pytest.raises(AssertionError, match="outside"):
        check(rounded, dtype, with_floor=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_summands_that_are_missing_or_off_are_found(dtype: torch.dtype) -> None:
    """Off by twice of what the bound allows: 8 units of rounding in half types."""
    x = summands()
    rounded = x.to(dtype).double()
    off = x + 2 * OF_TERMS[dtype] * x.abs()
    for got in (off.sum(0), rounded[1:].sum(0), rounded[:-1].sum(0)):
        with pytest.raises(AssertionError, match="outside"):
            check(got, dtype)
