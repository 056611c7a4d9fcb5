"""Lengths of sequences in every form, beside NPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import ascend_attn_ops as ops
import pytest
import torch
from device_samples import as_launched
from support.samples import OPERATORS, Operator, Sample
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits", "unchecked")


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
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
@each_sample
def test_lists_beside_a_default_device(sample: Sample) -> None:
    expected = tuple(x.cpu() for x in sample.call(torch.ops.ascend))
    lists = {name: x.tolist() for name, x in lengths_of(sample).items()}
    given = sample.to("npu").replace(**lists)
    # The operators of a host's lengths alone take lists.
    has_lists = "list" in getattr(torch.ops.ascend, sample.operator).overloads()
    for namespace in (ops, torch.ops.ascend) if has_lists else (ops,):
        assert_same_bits(tuple(x.cpu() for x in given.call(namespace)), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "npu"])
@each_sample
def test_tensors_of_either_device_and_dtype(
    sample: Sample, device: str, dtype: torch.dtype
) -> None:
    lengths = {name: x.to(device, dtype) for name, x in lengths_of(sample).items()}
    outputs = sample.to("npu").replace(**lengths).call(torch.ops.ascend)
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))
