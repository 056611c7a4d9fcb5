"""Calls that the limits of the sparse operators take, and whole products that they exclude."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.check.boundaries.sparse import (
    LIG,
    MAKERS,
    SFAG,
    Sizes,
    arguments,
    lightning_indexer_grad,
    tnd,
)
from torch import Tensor


def call(operator: str, device: str, sizes: Sizes) -> None:
    product, cann = device.split(":")
    with ascend_attn_ops.limits(product, cann):  # type: ignore[arg-type]
        getattr(torch.ops.ascend, operator)(**arguments(operator, sizes))


@pytest.mark.parametrize("operator", MAKERS)
def test_ascend_950_has_the_operators_from_cann_9_1(operator: str) -> None:
    if operator == LIG:  # which no CANN has there
        with pytest.raises(NotImplementedError, match="got Ascend 950;"):
            call(operator, "950:9.1", Sizes())
    else:
        call(operator, "950:9.1", Sizes())
        for cann in ("8.5", "9.0"):
            with pytest.raises(NotImplementedError, match=f"got Ascend 950 with CANN {cann}"):
                call(operator, f"950:{cann}", Sizes())
    with pytest.raises(NotImplementedError, match="got Ascend 310P;"):
        call(operator, "310P:9.1", Sizes())


@pytest.mark.parametrize("sizes", [Sizes(), tnd([4, 4], [4096, 8192])], ids=["BSND", "TND"])
def test_the_gradient_takes_indices_without_an_axis_of_heads(sizes: Sizes) -> None:
    for index_heads in (True, False):
        call(LIG, "A2:9.1", Sizes(lengths=sizes.lengths, index_heads=index_heads))
    given = lightning_indexer_grad(Sizes(lengths=sizes.lengths, index_heads=False))
    given["d_values"] = given["d_values"].unsqueeze(-2)
    torch.ops.ascend.lightning_indexer_grad(**given)
    given["d_values"] = given["d_values"][..., 1:]
    with pytest.raises(ValueError, match=r"d_values: expected shape .* K"):
        torch.ops.ascend.lightning_indexer_grad(**given)


def test_the_lengths_of_keys_are_checked_where_they_can_be_read() -> None:
    """In sparse_mode 0 the device reads K keys of every sequence."""
    given = lightning_indexer_grad(tnd([4, 4], [4096, 8192], options={}))
    given |= {"sparse_mode": 0}
    torch.ops.ascend.lightning_indexer_grad(**given)
    on_cpu = {
        name: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x
        for name, x in lightning_indexer_grad(tnd([2, 4], [2048, 4095])).items()
    }
    on_cpu["actual_seq_lengths_query"] = torch.tensor([2, 4], dtype=torch.int32)
    on_cpu["actual_seq_lengths_key"] = torch.tensor([2048, 4095], dtype=torch.int32)
    torch.ops.ascend.lightning_indexer_grad(**on_cpu)
    with pytest.raises(ValueError, match="in sparse_mode 0 on Ascend A2, got 2047 keys for K = "):
        torch.ops.ascend.lightning_indexer_grad(**on_cpu, sparse_mode=0)


def test_determinism_of_the_process(set_determinism: Any) -> None:
    set_determinism(True)
    with pytest.raises(ValueError, match="warn_only=True"):
        call(SFAG, "A2:8.5", Sizes())
    set_determinism(True, warn_only=True)
    call(SFAG, "A2:8.5", Sizes())
