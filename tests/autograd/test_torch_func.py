"""torch.func over every differentiable operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.gradients import differentiable_names, incoming_gradients
from support.samples import FIRST_DIFFERENTIABLE, OPERATORS, Recipe, Sample
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.func import functional_call, functionalize, grad, jvp, vmap

pytestmark = pytest.mark.usefixtures("no_limits")

each_operator = pytest.mark.parametrize(
    "recipe", FIRST_DIFFERENTIABLE, ids=lambda recipe: recipe.operator.name
)

Function = Callable[..., Tensor]


def scalar_of(sample: Sample, namespace: Any = ops) -> tuple[Function, tuple[Tensor, ...]]:
    """A scalar function of the tensors that the operator differentiates, and these."""
    names = differentiable_names(sample)
    d_outputs = incoming_gradients(sample, sample.call(torch.ops.ascend))

    def function(*tensors: Tensor) -> Tensor:
        call = sample.replace(**dict(zip(names, tensors, strict=True)))
        outputs = OPERATORS[sample.operator].gradient_outputs(call.call(namespace))
        # Padding of -inf, as the indexer's values have, has no part in a sum.
        terms = [
            (x * d).masked_fill(x == -torch.inf, 0).sum()
            for x, d in zip(outputs, d_outputs, strict=True)
        ]
        return sum(terms[1:], terms[0])

    return function, tuple(sample.tensors[name] for name in names)


def eager(sample: Sample) -> tuple[Tensor, ...]:
    function, tensors = scalar_of(sample)
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def examples(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Three, of which the second is the sample."""
    return tuple(torch.stack((x.flip(0), x, 0.5 * x)) for x in tensors)


@pytest.mark.parametrize("namespace", [ops, torch.ops.ascend], ids=["ops", "torch"])
@each_operator
def test_grad(recipe: Recipe, namespace: Any) -> None:
    sample = recipe.make(torch.float32)
    function, tensors = scalar_of(sample, namespace)
    actual = grad(function, argnums=tuple(range(len(tensors))))(*tensors)
    assert_same_bits(actual, eager(sample))
    assert_same_bits((grad(function)(*tensors),), eager(sample)[:1])


@each_operator
def test_vmap(recipe: Recipe) -> None:
    """Over every tensor that is differentiated, while the others are shared."""
    sample = recipe.make(torch.float32)
    names = differentiable_names(sample)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return sample.replace(**dict(zip(names, tensors, strict=True))).call(ops)

    batch = examples(tuple(sample.tensors[name] for name in names))
    outputs = vmap(function)(*batch)
    for i in range(3):
        expected = function(*(x[i] for x in batch))
        assert_same_bits(tuple(x[i] for x in outputs), expected)


@each_operator
def test_vmap_of_grad_and_grad_of_vmap(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    function, tensors = scalar_of(sample)
    batch = examples(tensors)
    positions = tuple(range(len(tensors)))
    per_example = vmap(grad(function, argnums=positions))(*batch)
    together = grad(lambda *x: vmap(function)(*x).sum(), argnums=positions)(*batch)
    assert_same_bits(tuple(x[1] for x in per_example), eager(sample))
    assert_same_bits(together, per_example)


@each_operator
def test_forward_mode(recipe: Recipe) -> None:
    function, tensors = scalar_of(recipe.make(torch.float64))
    message = r"^ascend::\w+: gradient: expected tensors without forward-mode tangents"
    for f in (function, grad(function)):
        with pytest.raises(NotImplementedError, match=message):
            jvp(f, tensors, tensors)


@each_operator
def test_functionalize(recipe: Recipe) -> None:
    function, tensors = scalar_of(recipe.make(torch.float32))
    assert_same_bits((functionalize(function)(*tensors),), (function(*tensors),))


@each_operator
def test_no_examples(recipe: Recipe) -> None:
    function, tensors = scalar_of(recipe.make(torch.float32))
    message = r"^ascend::\w+: vmap: expected at least one example, got none"
    with pytest.raises(ValueError, match=message):
        vmap(function)(*(x.expand(0, *x.shape) for x in tensors))


@each_operator
def test_autocast_of_the_call_holds_in_its_gradient(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    names = differentiable_names(sample)

    def function(*tensors: Tensor) -> Tensor:
        call = sample.replace(**dict(zip(names, tensors, strict=True)))
        with torch.autocast("cpu", torch.bfloat16):
            outputs = call.call(ops)
        # The indexer's values end in -inf.
        return recipe.operator.gradient_outputs(outputs)[0].clamp(min=-1e3).sum()

    tensors = tuple(sample.tensors[name] for name in names)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(function(*leaves), leaves)
    assert any(x.any() for x in expected)
    assert_same_bits(grad(function, argnums=tuple(range(len(names))))(*tensors), expected)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.endswith("_grad")])
def test_vmap_of_gradient_operators(name: str) -> None:
    sample = OPERATORS[name].small_sample()
    argument, query = next(iter(sample.inputs.items()))
    batch = torch.stack((query, query.flip(0)))
    outputs = vmap(lambda query: sample.replace(**{argument: query}).call(ops))(batch)
    assert_same_bits(tuple(x[0] for x in outputs), sample.call(ops))


def test_functional_call_of_the_indexer() -> None:
    torch.manual_seed(0)
    indexer = ops.LightningIndexer(8, num_heads=2, head_dim=16, rope_dim=0)
    query, latent = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 1, 16)
    hidden = torch.randn(3, 1, 5, 8)
    indices = indexer.select(indexer(hidden[0]), 3)
    _, *statistics = ops.sparse_flash_attention(query, latent, latent, indices, scale_value=0.25)

    def loss(parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
        projections = functional_call(indexer, parameters, (hidden,))
        return ops.lightning_indexer_kl_loss(
            query, latent, *projections, indices, *statistics, scale_value=0.25
        )

    parameters = {name: x.detach() for name, x in indexer.named_parameters()}
    per_example = vmap(grad(loss), (None, 0))(parameters, hidden)
    loss(dict(indexer.named_parameters()), hidden[1]).backward()
    for name, parameter in indexer.named_parameters():
        torch.testing.assert_close(per_example[name][1], parameter.grad)


def test_limits_of_the_call_hold_in_its_gradient() -> None:
    operator = OPERATORS["sparse_flash_attention"]
    function, tensors = scalar_of(operator.make(operator.cases[0], torch.float32))

    def without_limits(*tensors: Tensor) -> Tensor:
        with ops.limits(None):
            return function(*tensors)

    expected = grad(function)(*tensors)
    with ops.limits("A2"):
        assert torch.equal(grad(without_limits)(*tensors), expected)
        with pytest.raises(TypeError, match="expected dtype"):
            grad(function)(*tensors)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # as of each unknown operator
def test_inference_operators_are_mapped() -> None:
    x = torch.randn(3, 1, 4, 2 * 16, dtype=torch.bfloat16)

    def function(x: Tensor) -> Tensor:
        return ops.prompt_flash_attention(x, x, x, num_heads=2, layout="BSH")

    assert_same_bits((vmap(function)(x)[1],), (function(x[1]),))
    with pytest.raises(NotImplementedError, match="since this is an operator for inference"):
        grad(lambda x: function(x).sum())(x[0])


def test_helpers_take_the_tensors_of_transforms() -> None:
    """Which have no storage that could be looked at."""
    caches = torch.randn(2, 3, 4, 2, 16)
    expected = torch.stack([ops.nd_to_nz(cache) for cache in caches])
    assert torch.equal(vmap(ops.nd_to_nz)(caches), expected)
    gradient = grad(lambda cache: ops.nd_to_nz(cache).sum())(caches[0])
    assert torch.equal(gradient, torch.ones_like(caches[0]))
