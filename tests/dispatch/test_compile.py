"""Operators under torch.compile, torch.export and fake tensors."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.gradients import outputs_and_gradients
from support.samples import OPERATORS, RECIPES, Recipe, Sample, as_tuple, resized
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
PER_COMMIT = ("flash_attention_score", "sparse_flash_attention")
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
        RECIPES, lambda x: (*kind_of(x), x.differentiable, str(getattr(x.case, "mode", ""))),
        has_gradient,
    ),
)  # fmt: skip
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


@pytest.mark.parametrize(
    "operator",
    [
        pytest.param(x, marks=() if x in PER_COMMIT else nightly)
        for x in OPERATORS
        if not OPERATORS[x].in_place
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
        for variant in (recipe, resized(recipe)) if resize else (recipe,):
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
    sample, other = recipe.make(torch.bfloat16), resized(recipe).make(torch.bfloat16)

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


X, LATENT = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 1, 16)
INDICES = torch.arange(2, dtype=torch.int32).expand(2, 6, 1, 2)
DENSE = {"num_heads": 4, "layout": "BSND", "sparse_mode": 3}


@pytest.mark.parametrize(
    "call",
    [
        lambda x, _, counts: ascend_attn_ops.flash_attention_score(x, x, x, **DENSE, **counts)[0],
        lambda x, _, counts: ascend_attn_ops.prompt_flash_attention(
            x.detach(), x.detach(), x.detach(), **DENSE, **counts
        ),
        lambda x, _, counts: ascend_attn_ops.fused_infer_attention_score(
            x.detach(), x.detach(), x.detach(), **DENSE, **counts
        )[0],
        lambda x, latent, counts: ascend_attn_ops.sparse_flash_attention(
            x, latent, latent, INDICES, scale_value=1.0, **counts
        )[0],
        lambda x, _, counts: ascend_attn_ops.flash_attention_score(
            *[x.flatten(0, 1)] * 3, num_heads=4, layout="TND",
            **{name: 6 + y for name, y in counts.items()},
        )[0],
    ],
    ids=["flash", "prompt", "fused", "sparse", "packs"],
)  # fmt: skip
def test_other_lengths_in_tensors_are_no_other_graph(call: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for values in ([2, 5], [4, 6], [3, 3]):
            leaves = [x.clone().requires_grad_() for x in (X, LATENT)]
            names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
            lengths = dict.fromkeys(names, torch.tensor(values))
            out, expected = compiled(*leaves, lengths), call(*leaves, lengths)
            assert_same_bits((out,), (expected,))
            if expected.requires_grad:
                gradients, wanted = (
                    torch.autograd.grad(y.sum(), leaves, allow_unused=True, materialize_grads=True)
                    for y in (out, expected)
                )
                assert_same_bits(gradients, wanted)
