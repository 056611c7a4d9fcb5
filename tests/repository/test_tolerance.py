"""The bound on sums that nearly cancel, for sums whose exact value is known."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops.check.bounds import OF_TERMS, within
from support.tolerance import Tolerance, assert_close
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_summands_may_be_rounded(dtype: torch.dtype) -> None:
    """Without their size the bound is smaller than one rounding of each."""
    rounded = summands().to(dtype).double().sum(0)
    check(rounded, dtype)
    with pytest.raises(AssertionError, match="outside"):
        check(rounded, dtype, with_floor=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_summands_that_are_missing_or_off_are_found(dtype: torch.dtype) -> None:
    """Off by twice of what the bound allows: 8 units of rounding in half types."""
    x = summands()
    rounded = x.to(dtype).double()
    off = x + 2 * OF_TERMS[dtype] * x.abs()
    for got in (off.sum(0), rounded[1:].sum(0), rounded[:-1].sum(0)):
        with pytest.raises(AssertionError, match="outside"):
            check(got, dtype)
