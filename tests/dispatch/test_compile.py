"""Operators under torch.compile, torch.export and fake tensors."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops.check.gradients import outputs_and_gradients
from support.samples import OPERATORS, RECIPES, Recipe, Sample, as_tuple
from support.tolerance import assert_same_bits
from support.torch_defects import EXPORT_LOSES_STAR_ARGUMENTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = [pytest.mark.usefixtures("no_limits"), pytest.mark.smoke]

# Every seventh sample: these have every operator, layout, mode and kind of empty tensor.
SOME = [
    recipe
    for operator in OPERATORS.values()
    if not operator.in_place
    for recipe in operator.recipes[::7]
]


def kind_of(recipe: Recipe) -> tuple[str, str, bool]:
    """The operator, the layout, and whether another operator has the gradient."""
    return recipe.operator.name, recipe.layout, getattr(recipe.case, "is_extended", False)


# The first of each kind, and of these one per operator.
BY_LAYOUT = list({kind_of(r): r for r in reversed(RECIPES)}.values())
BSND = [recipe for recipe in BY_LAYOUT if recipe.layout in ("BSND", "")]


def name_of(recipe: Recipe) -> str:
    return recipe.id


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
    sample, operator = recipe.make(torch.float32), recipe.operator.overload
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    aot = "test_aot_dispatch_dynamic"
    if recipe.differentiable and not sample.call(torch.ops.ascend)[0].is_floating_point():
        # With gradients this check adds all outputs to the first one, which torch refuses for an
        # integer. test_compiles_once_for_all_sizes covers the rest.
        torch.library.opcheck(operator, sample.args, sample.options, test_utils=aot)
    else:
        checks.append(aot)
    if recipe.differentiable:
        sample = sample.requires_grad(recipe.operator.differentiable)
    torch.library.opcheck(operator, sample.args, sample.options, test_utils=checks)


@pytest.mark.parametrize("recipe", BY_LAYOUT, ids=name_of)
def test_compiles_once_for_all_sizes(recipe: Recipe) -> None:
    check_compiled(recipe, "aot_eager")


@pytest.mark.parametrize("recipe", BSND, ids=name_of)
def test_inductor(recipe: Recipe) -> None:
    check_compiled(recipe, "inductor")


def check_compiled(recipe: Recipe, backend: str) -> None:
    operator = recipe.operator.overload

    def function(sample: Sample) -> tuple[Tensor, ...]:
        return compiled(*sample.args, **sample.options)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args, **options: operator(*args, **options),
        fullgraph=True, dynamic=True, backend=backend,
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=True):
        for variant in (recipe, recipe.resized()):
            sample = variant.make(torch.bfloat16)
            for actual, expected in zip(
                outputs_and_gradients(sample, call=function),
                outputs_and_gradients(sample),
                strict=True,
            ):
                assert_same_bits(actual, expected)


@EXPORT_LOSES_STAR_ARGUMENTS
@pytest.mark.parametrize("recipe", BSND, ids=name_of)
def test_export_with_dynamic_sizes(recipe: Recipe) -> None:
    operator = recipe.operator.overload
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
