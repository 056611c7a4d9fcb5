"""The samples' own machinery, with a call whose arguments are lists of tensors."""

from __future__ import annotations

import pytest
import torch
from support.samples import OPERATORS, Sample

OPERATOR = OPERATORS["attention_update"]
NAMES = [f"{name}[{i}]" for name in ("lse", "local_out") for i in range(3)]


@pytest.fixture
def sample() -> Sample:
    return OPERATOR.make(OPERATOR.cases[0], torch.float32)


def test_tensors_of_a_list_have_names(sample: Sample) -> None:
    assert list(sample.tensors) == NAMES
    assert sample.tensors["local_out[1]"] is sample.inputs["local_out"][1]
    assert sample.tensor_names(["lse[2]", "local_out", "bias"]) == ("lse[2]", *NAMES[3:])
    zero = torch.zeros(2, 5)
    changed = sample.replace(**{"lse[1]": zero})
    assert changed.tensors["lse[1]"] is zero
    assert sample.tensors["lse[1]"] is not zero
    with pytest.raises(AssertionError, match="no scale"):
        sample.replace(scale=1.0)


def test_map_keeps_a_tensor_that_is_passed_twice(sample: Sample) -> None:
    x = sample.tensors["local_out[0]"]
    twice = sample.replace(local_out=[x, x, torch.ones_like(x)]).clone()
    first, second, other = twice.inputs["local_out"]
    assert first is second
    assert first is not x
    assert other is not first


def test_variants_in_memory_have_the_same_values(sample: Sample) -> None:
    expected, _ = sample.call(torch.ops.ascend)
    for variant in (sample.strided(), sample.transposed()):
        assert not all(x.is_contiguous() for x in variant.tensors.values())
        assert torch.equal(variant.call(torch.ops.ascend)[0], expected)
