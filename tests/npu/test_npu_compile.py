"""Operators on NPU tensors under torch.compile, torch's own checks, and `out=` overloads."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.gradients import outputs_and_gradients
from device_samples import DEVICE_RECIPES, as_launched, is_launched, one_of_each
from support.out_forms import FORMS, OUT_RECIPES, OutCall, fill, out_call, rubbish_like
from support.samples import OPERATORS, Operator, Recipe, Sample, bytes_of
from support.tolerance import assert_same_bits
from torch import Tensor


@pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)
def test_compile(recipe: Recipe) -> None:
    operator = recipe.operator.overload

    def function(sample: Sample) -> Any:
        return compiled(*sample.args, **sample.options)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args, **options: operator(*args, **options), backend="aot_eager", fullgraph=True
    )
    sample = recipe.make(torch.bfloat16)
    on_npu = outputs_and_gradients(sample.to("npu"), call=function)
    for actual, expected in zip(on_npu, outputs_and_gradients(sample), strict=True):
        assert_same_bits(tuple(x.cpu() for x in actual), expected)


def gradients(attend: Any, ends: list[int]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(12, 2, 64, generator=generator).to("npu", torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    out = attend(*leaves, torch.tensor(ends))
    return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def test_lengths_on_the_host_are_values() -> None:
    """Other lengths are no other program."""

    def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        lengths = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
        out = ops.flash_attention_score(query, key, value, layout="TND", sparse_mode=3, **lengths)
        return out[0] * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    gradients(compiled, [5, 12])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ends in ([5, 12], [12, 12], [1, 9]):
            assert_same_bits(gradients(compiled, ends), gradients(attend, ends))


@pytest.mark.usefixtures("no_limits", "unchecked")
@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if not x.in_place], ids=lambda x: x.name
)
def test_opcheck(operator: Operator) -> None:
    sample = operator.small_sample().to("npu")
    # test_autograd_registration knows no NPU, and test_schema compares with operators of torch_npu
    # that the simulation lacks. Neither depends on the device; the CPU's tests run both.
    utilities = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator.overload, sample.args, sample.options, test_utils=utilities)


# `out=` overloads write what they write on the CPU.


def on_npu(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> OutCall:
    call = out_call(recipe, dtype)
    outputs = tuple(x.npu() for x in call.outputs)
    return OutCall(call.operator, as_launched(call.sample).to("npu"), outputs)


def good(operator: Operator) -> OutCall:
    """A call whose outputs all have elements."""
    calls = (on_npu(recipe) for recipe in OUT_RECIPES if recipe.operator is operator)
    return next(x for x in calls if all(output.numel() for output in x.outputs))


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("recipe", one_of_each(filter(is_launched, OUT_RECIPES)))
def test_the_bytes_are_those_of_the_cpu(recipe: Recipe) -> None:
    call = on_npu(recipe)
    addresses = [x.data_ptr() for x in call.outputs]
    expected = as_launched(recipe.make(torch.bfloat16)).call(torch.ops.ascend)
    for x, y, z in zip(call.run(), call.outputs, expected, strict=True):
        assert x is y
        assert x.device.type == "npu"
        assert torch.equal(bytes_of(x.cpu()), bytes_of(z))
    assert [x.data_ptr() for x in call.outputs] == addresses


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("operator", FORMS, ids=lambda operator: operator.name)
def test_two_devices_and_one_call(operator: Operator) -> None:
    """Inputs on the CPU do not go to a kernel of the NPU, whatever the outputs are."""
    call = good(operator)
    with pytest.raises(ValueError, match="expected device npu:0, got cpu"):
        call.with_output(0, call.outputs[0].cpu()).run()
    on_cpu = OutCall(operator, call.sample.to("cpu"), rubbish_like(call.outputs))
    with pytest.raises(ValueError, match="expected device cpu, got npu:0"):
        on_cpu.run()
    for x in call.outputs:
        assert torch.equal(x.cpu(), fill(torch.empty_like(x, device="cpu")))
