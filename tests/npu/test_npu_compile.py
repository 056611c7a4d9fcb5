"""Operators on NPU tensors under torch.compile, and torch's own checks of an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import DIFFERENTIABLE, OPERATORS, RECIPES, Recipe
from tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

BY_LAYOUT = list({(r.operator, r.case.layout): r for r in reversed(RECIPES)}.values())
FIRST = [next(r for r in RECIPES if r.operator == operator) for operator in OPERATORS]


@pytest.mark.parametrize("recipe", BY_LAYOUT, ids=lambda recipe: recipe.id)
def test_compile(recipe: Recipe) -> None:
    operator = getattr(torch.ops.ascend, recipe.operator).default

    def function(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return operator(*args, **options)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    sample = recipe.make(torch.bfloat16)
    on_npu = sample.to("npu").requires_grad(DIFFERENTIABLE.get(sample.operator, ()))
    outputs = compiled(*on_npu.args, **on_npu.options)
    assert_same_bits(tuple(x.detach().cpu() for x in outputs), sample.call(torch.ops.ascend))


@pytest.mark.parametrize("recipe", FIRST, ids=lambda recipe: recipe.operator)
def test_opcheck(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16).to("npu")
    sample = sample.requires_grad(DIFFERENTIABLE.get(sample.operator, ()))
    operator = getattr(torch.ops.ascend, sample.operator).default
    # The fourth check, of the autograd registration, knows no NPU; the CPU's tests run it.
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, sample.args, sample.options, test_utils=utilities)
