"""`out=` overloads on NPU tensors write what they write on the CPU."""

from __future__ import annotations

import pytest
import torch
from device_samples import as_launched, is_launched, one_of_each
from support.out_forms import FORMS, OUT_RECIPES, OutCall, fill, out_call, rubbish_like
from support.samples import Operator, Recipe, bytes_of

pytestmark = pytest.mark.usefixtures("no_limits")


def on_npu(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> OutCall:
    call = out_call(recipe, dtype)
    outputs = tuple(x.npu() for x in call.outputs)
    return OutCall(call.operator, as_launched(call.sample).to("npu"), outputs)


def good(operator: Operator) -> OutCall:
    """A call whose outputs all have elements."""
    calls = (on_npu(recipe) for recipe in OUT_RECIPES if recipe.operator is operator)
    return next(x for x in calls if all(output.numel() for output in x.outputs))


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
