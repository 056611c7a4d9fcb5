"""An operator on NPU tensors gives, bit for bit, what it gives on the CPU.

The simulated device computes with the CPU kernels from the arguments that arrive at aclnn, so that
equal bits mean that every argument arrived as it should.
"""

from __future__ import annotations

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.gradients import gradients
from ascend_attn_check.samples.sparse import ALL_TOKENS, LENGTHS, SparseCase
from cann_simulator import computing
from device_samples import as_launched, is_launched, one_of_each
from support.samples import (
    DIFFERENTIABLE_RECIPES,
    OPERATORS,
    RECIPES,
    SPARSE_OPERATORS,
    Operator,
    Recipe,
    Sample,
)
from support.tolerance import assert_same_bits
from support.turns import nightly
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits", "no_leak")

# The dtypes that the device takes; the simulation refuses the others as the device does.
each_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=nightly), torch.bfloat16], ids=str
)


def on_npu(sample: Sample) -> Sample:
    return sample.to("npu")


def strided_on_npu(sample: Sample) -> Sample:
    """Every other element of a larger tensor, behind an offset."""

    def place(x: Tensor) -> Tensor:
        padded = torch.stack((torch.ones_like(x), x), -1).npu()
        return padded[..., 1]

    return sample.map(place)


def cpu(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    assert all(x.device.type == "npu" for x in outputs)
    return tuple(x.cpu() for x in outputs)


@each_dtype
@pytest.mark.parametrize("recipe", one_of_each(filter(is_launched, RECIPES)))
def test_forward(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = as_launched(recipe.make(dtype))
    expected = sample.call(torch.ops.ascend)
    for place in (on_npu, strided_on_npu):
        assert_same_bits(cpu(place(sample).call(torch.ops.ascend)), expected)


@pytest.mark.parametrize("operator", SPARSE_OPERATORS, ids=lambda x: x.name)
@pytest.mark.parametrize("left_out", LENGTHS)
def test_lengths_of_one_side(operator: Operator, left_out: str) -> None:
    """Which the launch may have to read."""
    sample = operator.make(ALL_TOKENS[left_out], torch.bfloat16)
    sample = as_launched(sample.replace(**{left_out: None}))
    expected = sample.call(torch.ops.ascend)
    assert_same_bits(cpu(on_npu(sample).call(torch.ops.ascend)), expected)


@pytest.mark.parametrize("name", ["lightning_indexer", "sparse_lightning_indexer_kl_loss_grad"])
def test_residuals_beside_an_empty_batch(name: str) -> None:
    """The launch leaves the empty batch out, and its residual."""
    case = SparseCase(b=3, s=(9, 4), lengths=((9, 0, 5), (4, 0, 2)), ratio=2, residuals=(0, 0, 1))
    sample = as_launched(OPERATORS[name].make(case, torch.bfloat16))
    expected = sample.call(torch.ops.ascend)
    assert_same_bits(cpu(on_npu(sample).call(torch.ops.ascend)), expected)


@pytest.mark.parametrize("tokens", ["pre_tokens", "next_tokens"])
def test_a_band_beyond_int32(tokens: str) -> None:
    query = torch.randn(1, 20, 2, 16, dtype=torch.bfloat16)
    options = {"layout": "BSND", "sparse_mode": 4, "scale_value": 0.25, tokens: 2**33}
    inputs = dict.fromkeys(("query", "key", "value"), query)
    sample = Sample("flash_attention_score", "", inputs, options)
    expected = sample.call(torch.ops.ascend)
    assert_same_bits(cpu(on_npu(sample).call(torch.ops.ascend)), expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if not x.in_place], ids=lambda x: x.name
)
def test_public_functions(operator: Operator) -> None:
    """Public functions do not go through torch.ops."""
    sample = as_launched(operator.small_sample())
    assert_same_bits(cpu(on_npu(sample).call(ascend_attn_ops)), sample.call(torch.ops.ascend))


@each_dtype
@pytest.mark.parametrize("recipe", one_of_each(filter(is_launched, DIFFERENTIABLE_RECIPES)))
def test_gradients(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = as_launched(recipe.make(dtype))
    assert_same_bits(cpu(gradients(on_npu(sample))), gradients(sample))


def test_the_device_computed_it() -> None:
    """Without its second phase a call leaves its outputs alone: the tests above can fail."""
    sample = RECIPES[0].make(torch.bfloat16)
    with computing(False):
        outputs = cpu(on_npu(sample).call(torch.ops.ascend))
    expected = sample.call(torch.ops.ascend)
    assert not all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
