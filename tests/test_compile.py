"""Operators under torch.compile, torch.export and fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("no_limits")

# Every seventh: all operators, and among them every layout, mode and kind of emptiness.
SOME = [
    recipe
    for operator in OPERATORS
    for recipe in [r for r in RECIPES if r.operator == operator][::7]
]
# The first of each operator in each layout.
BY_LAYOUT = list({(r.operator, r.case.layout): r for r in reversed(RECIPES)}.values())
BSND = [recipe for recipe in BY_LAYOUT if recipe.case.layout == "BSND"]


def name_of(recipe: Recipe) -> str:
    return recipe.id


def with_gradients(sample: Sample) -> Sample:
    return sample.requires_grad(DIFFERENTIABLE.get(sample.operator, ()))


def call_and_gradients(function: Any, sample: Sample) -> tuple[Tensor, ...]:
    sample = with_gradients(sample)
    outputs = as_tuple(function(*sample.args, **sample.options))
    if sample.operator not in DIFFERENTIABLE:
        return outputs
    leaves = [x for x in sample.tensors.values() if x.requires_grad]
    output = outputs[DIFFERENTIABLE_OUTPUT[sample.operator]]
    d_output = torch.full_like(output, 0.5)
    return (*outputs, *torch.autograd.grad(output, leaves, d_output))


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_fake_tensors(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = sample.map(mode.from_tensor).call(torch.ops.ascend)
    for x, y in zip(fake, sample.call(torch.ops.ascend), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert x.device == y.device


@pytest.mark.parametrize("recipe", SOME, ids=name_of)
def test_opcheck(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    operator = getattr(torch.ops.ascend, sample.operator).default
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    aot = "test_aot_dispatch_dynamic"
    if sample.operator == "lightning_indexer":
        # With gradients this check adds all outputs to an integer, the first one, which torch
        # refuses. What it would show is in test_compiles_once_for_all_sizes.
        torch.library.opcheck(operator, sample.args, sample.options, test_utils=aot)
    else:
        checks.append(aot)
    if recipe.differentiable:
        sample = with_gradients(sample)
    torch.library.opcheck(operator, sample.args, sample.options, test_utils=checks)


@pytest.mark.parametrize("recipe", BY_LAYOUT, ids=name_of)
def test_compiles_once_for_all_sizes(recipe: Recipe) -> None:
    check_compiled(recipe, "aot_eager")


@pytest.mark.parametrize("recipe", BSND, ids=name_of)
def test_inductor(recipe: Recipe) -> None:
    check_compiled(recipe, "inductor")


def check_compiled(recipe: Recipe, backend: str) -> None:
    operator = getattr(torch.ops.ascend, recipe.operator).default

    def function(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return operator(*args, **options)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for variant in (recipe, recipe.resized()):
            sample = variant.make(torch.bfloat16)
            actual = call_and_gradients(compiled, sample)
            assert_same_bits(actual, call_and_gradients(operator, sample))


@pytest.mark.parametrize("recipe", BSND, ids=name_of)
def test_export_with_dynamic_sizes(recipe: Recipe) -> None:
    operator = getattr(torch.ops.ascend, recipe.operator).default
    sample, other = recipe.make(torch.bfloat16), recipe.resized().make(torch.bfloat16)

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            call = sample.replace(**dict(zip(sample.tensors, tensors, strict=True)))
            return operator(*call.args, **call.options)

    dynamic = tuple(
        {
            axis: torch.export.Dim.DYNAMIC
            for axis in range(x.dim())
            if x.shape[axis] != other.tensors[name].shape[axis]
        }
        for name, x in sample.tensors.items()
    )
    tensors = tuple(sample.tensors.values())
    program = torch.export.export(Module(), tensors, dynamic_shapes=(dynamic,), strict=False)
    assert_same_bits(
        as_tuple(program.module()(*other.tensors.values())),
        as_tuple(operator(*other.args, **other.options)),
    )
