"""Every operator, forward and backward, on fake tensors of which each size is a symbol of its own.

Symbols have a hint, as under torch.compile(dynamic=True), or none, as those that depend on data or
that torch._dynamo.decorators.mark_unbacked marks. Without a hint no comparison can be decided.
"""

from __future__ import annotations

import ascend_attn_ops as ops
import pytest
import torch
from support.samples import OPERATORS, Recipe, as_tuple
from support.turns import first_of_each
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

# Before torch 2.11, UNBACKED had another name.
SYMBOLS = {
    "hints": DimDynamic.DYNAMIC,
    "no hints": getattr(DimDynamic, "UNBACKED", None) or DimDynamic.SIZE_LIKE_UNBACKED,  # type: ignore[attr-defined]
}
# The sizes that an operator prescribes: of axes of one key head, of statistics and of masks.
PRESCRIBED = {1, 8, 16, 2048, 3072}


def kind_of(recipe: Recipe) -> tuple[object, ...]:
    case = recipe.case
    return (
        recipe.operator.name, recipe.layout, bool(getattr(case, "page", 0)),
        getattr(case, "kind", None), getattr(case, "is_extended", False),
        getattr(case, "cache_mode", ""), getattr(case, "scatter", ""),
    )  # fmt: skip


def per_commit(recipe: Recipe) -> tuple[object, ...]:
    return recipe.operator.name, recipe.layout


ALL = [recipe for operator in OPERATORS.values() for recipe in operator.recipes]
SHOWN = first_of_each(ALL, kind_of, per_commit)
ON_DEVICE = first_of_each([x for x in ALL if x.on_device], kind_of, per_commit)


def trace(recipe: Recipe, symbols: str) -> ShapeEnv:
    undecided = symbols == "no hints" and any(x in recipe.id for x in ("kv_quant", "pse0full"))
    if undecided and torch.__version__ < (2, 8):
        pytest.skip("torch 2.7 does not decide whether these strides are channels_last")
    sizes = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=False)
    names = iter(range(100))

    def fake(x: Tensor) -> Tensor:
        context = StatelessSymbolicContext(
            dynamic_sizes=[SYMBOLS[symbols]] * x.dim(), constraint_sizes=[None] * x.dim()
        )
        source = ConstantSource(f"tensor{next(names)}")
        return mode.from_tensor(x, symbolic_context=context, source=source)

    sample = recipe.make(torch.bfloat16)
    if recipe.differentiable:
        sample = sample.requires_grad(recipe.operator.differentiable)
    sample = sample.map(fake)
    with mode:
        outputs = [x for x in as_tuple(sample.call(torch.ops.ascend)) if x.requires_grad]
        if outputs:
            leaves = [x for x in sample.tensors.values() if x.requires_grad]
            d_outputs = [torch.ones_like(x) for x in outputs]
            gradients = torch.autograd.grad(outputs, leaves, d_outputs)
            assert all(x.shape == y.shape for x, y in zip(gradients, leaves, strict=True))
    return sizes


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("symbols", SYMBOLS)
@pytest.mark.parametrize("recipe", SHOWN)
def test_without_limits(recipe: Recipe, symbols: str) -> None:
    sizes = trace(recipe, symbols)
    constants = {int(x) for x in sizes.replacements.values() if x.is_number}
    options = recipe.make(torch.bfloat16).options.values()
    assert constants <= PRESCRIBED | {x for x in options if isinstance(x, int)}


@pytest.mark.parametrize("symbols", SYMBOLS)
@pytest.mark.parametrize("recipe", ON_DEVICE)
def test_under_the_limits_of_a_device(recipe: Recipe, symbols: str) -> None:
    with ops.limits("A2"):
        trace(recipe, symbols)


def test_no_operator_is_left_out() -> None:
    assert {x.values[0].operator.name for x in SHOWN} == OPERATORS.keys()
