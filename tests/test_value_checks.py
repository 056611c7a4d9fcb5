"""The checked mode on the CPU, where it finds what a device could not do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import ascend_attn_ops as ops
import pytest
import torch
from support.checked_calls import CHECKED_CALLS, RIGHT_CALLS, CheckedCall
from support.samples import Sample
from support.tolerance import assert_same_bits


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("call", CHECKED_CALLS, ids=lambda x: x.id)
def test_a_call_that_no_device_can(call: CheckedCall) -> None:
    sample = call.make()
    sample.call(torch.ops.ascend)
    with ops.check_values(), pytest.raises(ValueError, match=call.message):
        sample.call(torch.ops.ascend)


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("make", RIGHT_CALLS)
def test_right_calls(make: Callable[[], Sample]) -> None:
    expected = make().call(torch.ops.ascend)
    with ops.check_values():
        assert_same_bits(make().call(torch.ops.ascend), expected)


def test_the_gradient_of_a_recorded_call() -> None:
    query, key = torch.randn(1, 2, 8, 16, requires_grad=True), torch.randn(1, 2, 1, 16)
    indices = torch.tensor([0, -1], dtype=torch.int32).expand(1, 2, 1, 2)
    with ops.limits(None):
        out, *_ = ops.sparse_flash_attention(query, key, key, indices, scale_value=0.1)
    with ops.check_values(), pytest.raises(ValueError, match=r"got -1 at \(0, 1, 0, 1\)"):
        out.sum().backward()


@pytest.mark.usefixtures("no_limits")
def test_counts_of_paged_keys_that_are_cumulative() -> None:
    query, pages = torch.randn(3, 1, 2, 16), torch.randn(9, 16, 32)
    table = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 0, 0]], dtype=torch.int32)

    def attend(counts: list[int]) -> None:
        options = {"block_table": table, "actual_seq_lengths_key": counts, "layout": "BSND"}
        ops.fused_infer_attention_score(query, pages, pages, **options)

    with ops.check_values():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend([17, 18, 32])  # which happen to increase
        with pytest.warns(
            UserWarning, match=r"\[20, 30, 62\] look cumulative, and sequence 2 reads"
        ):
            attend([20, 30, 62])
