"""Gradients through autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ascend_attn_check.gradients import differentiable_names, gradients, incoming_gradients
from ascend_attn_ops import reference
from support.samples import (
    DIFFERENTIABLE_RECIPES,
    FIRST_DIFFERENTIABLE,
    OPERATORS,
    Gradient,
    Operator,
    Recipe,
    Sample,
    as_tuple,
    bytes_of,
    named_tensors,
)
from support.tolerance import TOLERANCES, assert_close, assert_same_bits
from support.turns import by_turns
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

pytestmark = pytest.mark.usefixtures("no_limits")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

each_recipe = pytest.mark.parametrize("recipe", DIFFERENTIABLE_RECIPES, ids=lambda r: r.id)
each_operator = pytest.mark.parametrize(
    "recipe", FIRST_DIFFERENTIABLE, ids=lambda recipe: recipe.operator.name
)


def gradient_of(sample: Sample) -> Gradient:
    gradient = OPERATORS[sample.operator].gradient
    assert gradient is not None
    return gradient


def differentiable_outputs(sample: Sample, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return OPERATORS[sample.operator].gradient_outputs(outputs)


def by_name(sample: Sample, results: Sequence[Any]) -> dict[str, Tensor]:
    """Results that a record states, one per differentiable argument, by the names of tensors."""
    return named_tensors(dict(zip(gradient_of(sample).inputs, results, strict=True)))


def reference_gradients(sample: Sample, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """In fp64."""
    leaf = sample.double().requires_grad(names)
    outputs = leaf.call(reference)
    d_outputs = incoming_gradients(leaf, outputs)
    stated = gradient_of(sample).stated
    if stated is not None:
        results = by_name(sample, stated(leaf, outputs, *d_outputs))
        return tuple(results[name] for name in names)
    leaves = [leaf.tensors[name] for name in names]
    carrying = differentiable_outputs(sample, outputs)
    if not any(x.requires_grad for x in carrying):  # no query of this sample sees a key
        return tuple(torch.zeros_like(x) for x in leaves)
    return torch.autograd.grad(carrying, leaves, d_outputs)


def floors(sample: Sample, names: tuple[str, ...]) -> tuple[Tensor | float, ...]:
    """Returns the rounding error of each gradient whose summands nearly cancel."""
    gradient = gradient_of(sample)
    if gradient.expected is None:
        return (0.0,) * len(names)
    outputs = as_tuple(sample.call(reference))
    expected = gradient.expected(sample, outputs, *incoming_gradients(sample, outputs))
    results = [x.allowed for x in expected]
    return tuple(by_name(sample, results)[name] for name in names)


@by_turns(4)
@each_recipe
def test_each_argument_alone_gets_its_gradient(recipe: Recipe) -> None:
    """Autograd silently drops gradients of tensors that are not passed to it one by one."""
    sample = recipe.make(torch.float32)
    names = differentiable_names(sample)
    for name, expected in zip(names, gradients(sample), strict=True):
        assert_same_bits(gradients(sample, (name,)), (expected,))


@each_operator
def test_compiled_autograd_over_an_eager_forward(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    expected = gradients(sample)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert_same_bits(gradients(sample), expected)


@by_turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_recipe
def test_gradients_are_those_of_the_reference(recipe: Recipe, dtype: torch.dtype) -> None:
    """Not in half precision, where the backward starts from a rounded `out`: see the next test."""
    sample = recipe.make(dtype)
    names = differentiable_names(sample)
    actual, expected = gradients(sample, names), reference_gradients(sample, names)
    for name, x, y, floor in zip(names, actual, expected, floors(sample, names), strict=True):
        assert x.dtype == dtype
        assert_close(f"gradient of {name}", x, y, TOLERANCES[dtype], floor)


@by_turns(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "recipe",
    [r for r in DIFFERENTIABLE_RECIPES if r.operator.gradient and r.operator.gradient.backward],
    ids=lambda recipe: recipe.id,
)
def test_backward_is_the_grad_operator(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    outputs = sample.call(torch.ops.ascend)
    backward = gradient_of(sample).backward
    assert backward is not None
    expected = by_name(sample, backward(sample, outputs, *incoming_gradients(sample, outputs)))
    names = differentiable_names(sample)
    assert_same_bits(gradients(sample, names), tuple(expected[name] for name in names))


def differentiable_function(
    sample: Sample,
) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """The operator as gradcheck wants it, and the leaves it is a function of."""
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        call = leaf.replace(**dict(zip(names, leaves, strict=True)))
        outputs = differentiable_outputs(sample, call.call(torch.ops.ascend))
        # Padding of -inf, as the indexer's values have, has no difference.
        return tuple(x.masked_fill(x == -torch.inf, 0) for x in outputs)

    return function, tuple(leaf.tensors[name] for name in names)


@by_turns(2)
@each_recipe
def test_gradcheck(recipe: Recipe) -> None:
    sample = recipe.make(torch.float64)
    # The target of these is no distribution over the selected keys.
    if "kl_loss" in sample.operator and recipe.case.pattern in ("hole", "partial", "clamped"):
        pytest.skip("the specification states another gradient than that of the function")
    if any(x.numel() == 0 for x in sample.tensors.values()):
        pytest.skip("nothing to perturb")
    function, leaves = differentiable_function(sample)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-6)


@each_operator
def test_gradcheck_of_every_element(recipe: Recipe) -> None:
    function, leaves = differentiable_function(recipe.make(torch.float64))
    assert torch.autograd.gradcheck(lambda *x: tuple(y.sum(-1) for y in function(*x)), leaves)


@each_operator
def test_what_carries_no_gradient(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    leaf = sample.requires_grad(differentiable_names(sample))
    outputs = leaf.call(torch.ops.ascend)
    # tests/test_statistics.py has the gradients through statistics.
    carrying = (*gradient_of(sample).outputs, "softmax_sum", "softmax_lse")
    carries = [name in carrying for name in recipe.operator.output_names]
    assert [x.requires_grad for x in outputs] == carries
    assert not any(x.requires_grad for x in sample.call(torch.ops.ascend))
    with torch.no_grad():
        assert not any(x.requires_grad for x in leaf.call(torch.ops.ascend))

    others = sample.tensors.keys() - set(differentiable_names(sample))
    for name in (name for name in others if sample.tensors[name].is_floating_point()):
        outputs = sample.requires_grad((name,)).call(torch.ops.ascend)
        assert not any(x.requires_grad for x in outputs), name


class _WantsGradient(torch.autograd.Function):
    """Like DTensor.to_local(), whose backward fails without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor | None) -> Tensor:
        assert d is not None
        return d


@each_operator
def test_no_edge_without_a_gradient(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    leaf = sample.map(lambda x: x.clone().requires_grad_(x.is_floating_point()))
    outputs = leaf.map(lambda x: _WantsGradient.apply(x) if x.is_floating_point() else x).call(
        torch.ops.ascend
    )
    torch.autograd.backward([x.sum() for x in differentiable_outputs(sample, outputs)])
    with_gradient = {name for name, x in leaf.tensors.items() if x.grad is not None}
    assert with_gradient == set(differentiable_names(sample))


@each_operator
def test_undefined_gradient(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    leaf = sample.requires_grad(differentiable_names(sample))
    for output in differentiable_outputs(sample, leaf.call(torch.ops.ascend)):
        torch._C._functions.UndefinedGrad()(output).sum().backward(retain_graph=True)
    for name in differentiable_names(sample):
        gradient = leaf.tensors[name].grad
        assert gradient is None or not gradient.any()


@pytest.mark.parametrize(
    "name", ["flash_attention_score", "lightning_indexer", "sparse_flash_attention"]
)
def test_undefined_gradient_reads_no_input(name: str) -> None:
    """So that it does not matter when one has changed since."""
    recipe = next(recipe for recipe in DIFFERENTIABLE_RECIPES if recipe.operator.name == name)
    sample = recipe.make(torch.float32)
    names = differentiable_names(sample)
    leaves = sample.requires_grad(names)
    changed = leaves.map(lambda x: x.clone() if x.requires_grad else x)
    outputs = differentiable_outputs(sample, changed.call(torch.ops.ascend))
    with torch.no_grad():
        for name in names:
            changed.tensors[name].zero_()
    torch._C._functions.UndefinedGrad()(outputs[0]).sum().backward()


@each_operator
def test_expanded_gradient(recipe: Recipe) -> None:
    """The gradient of a sum has no memory of its own."""
    # The sum of a sample without padding of -inf has a gradient.
    sample = next(
        sample
        for sample in (r.make(torch.float32) for r in recipe.operator.recipes if r.differentiable)
        if all(
            x.isfinite().all()
            for x in differentiable_outputs(sample, sample.call(torch.ops.ascend))
        )
    )
    results = []
    for ones in (Tensor.sum, lambda x: (x * torch.ones_like(x)).sum()):
        leaf = sample.requires_grad(differentiable_names(sample))
        outputs = differentiable_outputs(sample, leaf.call(torch.ops.ascend))
        torch.autograd.backward([ones(x) for x in outputs])
        results.append(tuple(leaf.tensors[name].grad for name in differentiable_names(sample)))
    assert_same_bits(*results)


@each_operator
def test_second_derivative(recipe: Recipe) -> None:
    sample = recipe.make(torch.float64)
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    outputs = leaf.call(torch.ops.ascend)
    d_outputs = [x.requires_grad_() for x in incoming_gradients(sample, outputs)]
    leaves = [leaf.tensors[name] for name in names]

    def differentiate_twice() -> None:
        first = torch.autograd.grad(
            differentiable_outputs(sample, outputs), leaves, d_outputs, create_graph=True
        )
        torch.autograd.grad(sum(x.sum() for x in first), leaves)

    with pytest.raises(NotImplementedError, match=r"^ascend::\w+: .*derivative"):
        differentiate_twice()


@each_operator
def test_deterministic_algorithms(recipe: Recipe, set_determinism: Any) -> None:
    sample = recipe.make(torch.bfloat16)
    names = differentiable_names(sample)
    expected = gradients(sample, names)
    set_determinism(True)
    assert_same_bits(gradients(sample, names), expected)


@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if x.gradient or x.inference_only],
    ids=lambda operator: operator.name,
)  # fmt: skip
def test_forward_mode_is_refused(operator: Operator) -> None:
    """Tangents of optional tensors, too: ignoring them would be silently wrong. Nor is a cache
    written to, in which the tangent of its rows would end."""
    samples = [recipe.make(torch.float32) for recipe in operator.recipes]
    sample = max(samples, key=lambda sample: len(sample.tensors))
    before = [bytes_of(x).clone() for x in sample.tensors.values()]
    for name, x in sample.tensors.items():
        if not x.is_floating_point():
            continue
        with (
            forward_ad.dual_level(),
            pytest.raises(
                NotImplementedError, match=r"gradient: .* forward-mode .* got a dual tensor"
            ),
        ):
            sample.replace(**{name: forward_ad.make_dual(x, x)}).call(torch.ops.ascend)
    assert all(map(torch.equal, map(bytes_of, sample.tensors.values()), before))
