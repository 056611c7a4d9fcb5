"""Operators under torch.compile, torch.export and fake tensors."""

from __future__ import annotations

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.check.gradients import outputs_and_gradients
from support.samples import OPERATORS, RECIPES, Recipe, Sample, as_tuple
from support.tolerance import assert_same_bits
from support.torch_defects import EXPORT_LOSES_STAR_ARGUMENTS
from support.turns import by_turns, first_of_each, nightly
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = [pytest.mark.usefixtures("no_limits"), pytest.mark.smoke]


def kind_of(recipe: Recipe) -> tuple[str, str, bool]:
    """The operator, the layout, and whether another operator has the gradient."""
    return recipe.operator.name, recipe.layout, getattr(recipe.case, "is_extended", False)


def has_gradient(recipe: Recipe) -> tuple[str, bool]:
    return recipe.operator.name, recipe.differentiable


def form_of(recipe: Recipe) -> tuple[bool, bool, bool]:
    """Returns what inductor's code depends on (in place: test_scatter_pa_kv_cache.py)."""
    schema = recipe.operator.overload._schema
    lists = any(str(x.type) == "List[Tensor]" for x in schema.arguments)
    return len(schema.returns) > 1, lists, recipe.differentiable


# One per layout; of operators without one, the first.
ONE_LAYOUT = [recipe for recipe in RECIPES if recipe.layout in ("BSND", "")]
WITH_DYNAMIC_SIZES = first_of_each(ONE_LAYOUT, kind_of, has_gradient)


@by_turns(4)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
def test_fake_tensors(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = sample.map(mode.from_tensor).call(torch.ops.ascend)
    for x, y in zip(fake, sample.call(torch.ops.ascend), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert x.device == y.device


@pytest.mark.parametrize(
    "recipe",
    first_of_each(
        RECIPES,
        lambda x: (*kind_of(x), x.differentiable, str(getattr(x.case, "mode", ""))),
        has_gradient,
    ),
)
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


@pytest.mark.parametrize("recipe", first_of_each(RECIPES, kind_of, lambda x: kind_of(x)[::2]))
def test_compiles_once_for_all_sizes(recipe: Recipe) -> None:
    check_compiled(recipe, "aot_eager")


@pytest.mark.parametrize("recipe", first_of_each(ONE_LAYOUT, kind_of, form_of))
def test_inductor(recipe: Recipe) -> None:
    check_compiled(recipe, "inductor")


# Inductor passes copies of key and value, which by the limits of a device must be one tensor.
VALUE_IS_NOT_KEY = pytest.mark.xfail(strict=True, reason="inductor copies key and value apart")


@pytest.mark.parametrize(
    "operator",
    [
        "flash_attention_score",
        pytest.param("sparse_flash_attention", marks=VALUE_IS_NOT_KEY),
        pytest.param("sparse_flash_attention_grad", marks=(VALUE_IS_NOT_KEY, nightly)),
        *(
            pytest.param(x.name, marks=nightly)
            for x in OPERATORS.values()
            if not x.in_place and not x.name.startswith(("flash_attention_score", "sparse_flash_a"))
        ),
    ],
)
def test_inductor_under_limits(operator: str) -> None:
    with ascend_attn_ops.limits("A2"):
        check_compiled(
            next(x for x in OPERATORS[operator].recipes if x.on_device), "inductor", False
        )


def check_compiled(recipe: Recipe, backend: str, resize: bool = True) -> None:
    operator = recipe.operator.overload

    def function(sample: Sample) -> tuple[Tensor, ...]:
        return compiled(*sample.args, **sample.options)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args, **options: operator(*args, **options),
        fullgraph=True, dynamic=True, backend=backend,
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=True):
        for variant in (recipe, recipe.resized()) if resize else (recipe,):
            sample = variant.make(torch.bfloat16)
            for actual, expected in zip(
                outputs_and_gradients(sample, call=function),
                outputs_and_gradients(sample),
                strict=True,
            ):
                assert_same_bits(actual, expected)


@EXPORT_LOSES_STAR_ARGUMENTS
@pytest.mark.parametrize("recipe", WITH_DYNAMIC_SIZES)
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
