"""The samples' own machinery, with a call whose arguments are lists of tensors."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops.check.gradients import differentiable_names, gradients
from support.samples import OPERATORS, Sample, named_tensors
from torch import Tensor

OPERATOR = OPERATORS["attention_update"]
NAMES = [f"{name}[{i}]" for name in ("lse", "local_out") for i in range(3)]


@pytest.fixture
def sample() -> Sample:
    return OPERATOR.make(OPERATOR.cases[0], torch.float32)


def result(sample: Sample) -> Tensor:
    return sample.call(torch.ops.ascend)[0]


def test_tensors_of_a_list_have_names(sample: Sample) -> None:
    assert list(sample.tensors) == NAMES
    assert sample.tensors["local_out[1]"] is sample.inputs["local_out"][1]
    assert sample.tensor_names(["local_out"]) == tuple(NAMES[3:])
    assert sample.tensor_names(["lse[2]", "bias"]) == ("lse[2]",)
    # Lists of numbers are not among them.
    assert named_tensors({"lengths": [1, 2], "x": None, "y": torch.ones(1)}).keys() == {"y"}


def test_replace_changes_one_tensor_of_a_list_or_all(sample: Sample) -> None:
    zero = torch.zeros(2, 5)
    changed = sample.replace(**{"lse[1]": zero})
    assert changed.tensors["lse[1]"] is zero
    assert changed.tensors["lse[0]"] is sample.tensors["lse[0]"]
    assert sample.tensors["lse[1]"] is not zero
    shorter = sample.replace(lse=[zero], local_out=[torch.ones(2, 5, 24)])
    assert list(shorter.tensors) == ["lse[0]", "local_out[0]"]
    with pytest.raises(AssertionError, match="no scale"):
        sample.replace(scale=1.0)
    assert sample.given(scale=1.0).options == {**sample.options, "scale": 1.0}


def test_map_keeps_a_tensor_that_is_passed_twice(sample: Sample) -> None:
    x = sample.tensors["local_out[0]"]
    twice = sample.replace(local_out=[x, x, torch.ones_like(x)]).clone()
    first, second, other = twice.inputs["local_out"]
    assert first is second
    assert first is not x
    assert other is not first
    assert {x.dtype for x in sample.double().tensors.values()} == {torch.float64}
    assert {x.device.type for x in sample.to("meta").tensors.values()} == {"meta"}


def test_variants_in_memory_have_the_same_values(sample: Sample) -> None:
    for variant in (sample.strided(), sample.transposed()):
        assert not all(x.is_contiguous() for x in variant.tensors.values())
        assert torch.equal(result(variant), result(sample))


def test_leaves_are_the_tensors_that_are_asked_for(sample: Sample) -> None:
    def leaves(*names: str) -> list[str]:
        return [n for n, x in sample.requires_grad(names).tensors.items() if x.requires_grad]

    assert leaves("local_out") == NAMES[3:]
    assert leaves("lse[1]", "bias") == ["lse[1]"]
    assert not leaves()


def test_gradients(sample: Sample) -> None:
    assert differentiable_names(sample) == tuple(NAMES)
    together = gradients(sample)
    assert [x.shape for x in together] == [x.shape for x in sample.tensors.values()]
    (alone,) = gradients(sample, ["local_out[1]"])
    assert torch.equal(alone, together[4])


def test_a_call_without_outputs_returns_nothing(sample: Sample) -> None:
    namespace = type("Namespace", (), {"attention_update": lambda *args, **options: None})
    assert sample.call(namespace) == ()
