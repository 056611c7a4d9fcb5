"""Operators on NPU tensors under torch.compile, and torch's own checks of an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_samples import DEVICE_RECIPES
from samples import (
    DIFFERENTIABLE,
    DIFFERENTIABLE_OUTPUT,
    OPERATORS,
    RECIPES,
    Recipe,
    Sample,
    as_tuple,
)
from tolerance import assert_same_bits
from torch import Tensor

FIRST = [next(r for r in RECIPES if r.operator == operator) for operator in OPERATORS]


@pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)
def test_compile(recipe: Recipe) -> None:
    operator = getattr(torch.ops.ascend, recipe.operator).default

    def function(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return operator(*args, **options)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    sample = recipe.make(torch.bfloat16)
    actual = call_and_gradients(compiled, sample.to("npu"))
    assert_same_bits(tuple(x.cpu() for x in actual), call_and_gradients(operator, sample))


def call_and_gradients(function: Any, sample: Sample) -> tuple[Tensor, ...]:
    sample = sample.requires_grad(DIFFERENTIABLE.get(sample.operator, ()))
    outputs = as_tuple(function(*sample.args, **sample.options))
    leaves = list({id(x): x for x in sample.tensors.values() if x.requires_grad}.values())
    gradients: tuple[Tensor, ...] = ()
    if leaves:
        output = outputs[DIFFERENTIABLE_OUTPUT[sample.operator]]
        gradients = torch.autograd.grad(output, leaves, torch.full_like(output, 0.5))
    return (*(x.detach() for x in outputs), *gradients)


# Without the limits, which ask for value to be key: opcheck clones its arguments one by one.
@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("recipe", FIRST, ids=lambda recipe: recipe.operator)
def test_opcheck(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16).to("npu")
    operator = getattr(torch.ops.ascend, sample.operator).default
    # test_autograd_registration knows no NPU, and test_schema compares with operators of torch_npu
    # that the simulation lacks. Neither depends on the device; the CPU's tests run both.
    utilities = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, sample.args, sample.options, test_utils=utilities)
