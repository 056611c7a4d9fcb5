"""Lengths of sequences in every form, beside NPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from device_samples import as_launched
from support.samples import OPERATORS, Operator, Sample
from support.simulated_npu import attention_functions
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")


def lengths_of(sample: Sample) -> dict[str, Tensor]:
    return {
        name: x
        for name, x in sample.tensors.items()
        if name.startswith(("actual_seq_lengths", "prefix"))
    }


def sample_of(operator: Operator) -> Sample | None:
    """The first sample with lengths."""
    samples = (recipe.make(torch.bfloat16) for recipe in operator.recipes)
    return next((as_launched(x) for x in samples if lengths_of(x)), None)


SAMPLES = [x for x in map(sample_of, OPERATORS.values()) if x is not None]
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda x: x.operator)


@pytest.fixture(params=[None, "npu"])
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.device(request.param) if request.param else nullcontext():
        yield


@pytest.mark.usefixtures("default_device", "unchecked")
@each_sample
def test_lists_beside_a_default_device(sample: Sample) -> None:
    expected = tuple(x.cpu() for x in sample.call(torch.ops.ascend))
    lists = {name: x.tolist() for name, x in lengths_of(sample).items()}
    given = sample.to("npu").replace(**lists)
    # The operators of a host's lengths alone take lists.
    has_lists = "list" in getattr(torch.ops.ascend, sample.operator).overloads()
    for namespace in (ops, torch.ops.ascend) if has_lists else (ops,):
        assert_same_bits(tuple(x.cpu() for x in given.call(namespace)), expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "npu"])
@each_sample
def test_tensors_of_either_device_and_dtype(
    sample: Sample, device: str, dtype: torch.dtype
) -> None:
    lengths = {name: x.to(device, dtype) for name, x in lengths_of(sample).items()}
    outputs = sample.to("npu").replace(**lengths).call(torch.ops.ascend)
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))


# Padded batches in layouts other than TND, for which CANN takes no lengths.

QUERIES, KEYS = [5, 2, 0], [6, 7, 3]
# Where tokens lie one behind the other, padding is sequences without keys, or without queries.
ENDS = {
    "BSND": ([5, 6, 6, 8, 12, 12, 18, 18], [6, 6, 7, 14, 14, 17, 17, 21]),
    "SBH": ([5, 7, 7], [6, 13, 16]),
}


def results(device: str, layout: str, **options: Any) -> tuple[Tensor, ...]:
    """The outputs, and the gradients of query, key and value."""
    generator = torch.Generator().manual_seed(0)
    query, keys = {"BSND": [(3, 6, 2, 16), (3, 7, 2, 16)], "SBH": [(6, 3, 32), (7, 3, 32)]}[layout]
    leaves = [
        torch.randn(x, generator=generator).half().to(device).requires_grad_()
        for x in (query, keys, keys)
    ]
    d_out = torch.ones(query, dtype=torch.float16, device=device)
    before = cann_simulator.waits()
    outputs = ops.flash_attention_score(
        *leaves, num_heads=2, layout=layout, actual_seq_lengths_query=QUERIES,
        actual_seq_lengths_key=KEYS, **options,
    )  # fmt: skip
    gradients = torch.autograd.grad(outputs[0], leaves, d_out)
    assert cann_simulator.waits() == before
    return *outputs, *gradients


@pytest.mark.parametrize("layout", ["BSND", "SBH"])
@pytest.mark.parametrize("mode", [0, 3])
def test_padding_is_left_out_without_waiting(layout: str, mode: int) -> None:
    expected = results("cpu", layout, sparse_mode=mode)
    # The first call makes the mask, once for all streams.
    with suppress(AssertionError):
        results("npu", layout, sparse_mode=mode)
    with cann_simulator.recorded_calls() as log:
        actual = results("npu", layout, sparse_mode=mode)
    assert_same_bits(tuple(x.cpu() for x in actual), tuple(x.detach() for x in expected))
    assert set(attention_functions(log)) == {
        "aclnnFlashAttentionVarLenScoreV2", "aclnnFlashAttentionUnpaddingScoreGradV2"
    }  # fmt: skip
    calls = [x["arguments"] for x in log if "actualSeqQLenOptional" in x.get("arguments", ())]
    assert [x["actualSeqQLenOptional"] for x in calls] == [ENDS[layout][0]] * 2
    assert [x["actualSeqKvLenOptional"] for x in calls] == [ENDS[layout][1]] * 2


def test_a_mask_of_keys() -> None:
    mask = torch.arange(7) > torch.tensor([3, 6, 1])[:, None]
    options = {"sparse_mode": 1, "atten_mask": mask[:, None, None]}
    expected = results("cpu", "BSND", **options)
    options["atten_mask"] = mask.npu()[:, None, None]
    actual = results("npu", "BSND", **options)
    assert_same_bits(tuple(x.cpu() for x in actual), tuple(x.detach() for x in expected))
