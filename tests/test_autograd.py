"""Gradients through autograd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from ascend_attn_ops import reference
from samples import DIFFERENTIABLE, DIFFERENTIABLE_OUTPUT, RECIPES, Recipe, Sample
from tolerance import TOLERANCES, assert_close, assert_same_bits
from torch import Tensor
from torch.autograd import forward_ad

pytestmark = pytest.mark.usefixtures("no_limits")

PROMPT = "prompt_flash_attention"
KL_LOSS = "sparse_lightning_indexer_grad_kl_loss"
ALL = [r for r in RECIPES if r.operator in DIFFERENTIABLE and r.differentiable]
FIRST = [next(r for r in ALL if r.operator == operator) for operator in DIFFERENTIABLE]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

each_recipe = pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.id)
each_operator = pytest.mark.parametrize("recipe", FIRST, ids=lambda recipe: recipe.operator)


def differentiable_names(sample: Sample) -> tuple[str, ...]:
    return tuple(name for name in DIFFERENTIABLE[sample.operator] if name in sample.tensors)


def differentiable_output(sample: Sample, outputs: Sequence[Tensor]) -> Tensor:
    return outputs[DIFFERENTIABLE_OUTPUT[sample.operator]]


def incoming_gradient(sample: Sample, outputs: Sequence[Tensor]) -> Tensor:
    """Random. Of the loss a power of two: to scale by it is exact.

    Of the indexer's values, the same for a key in whatever slot it stands: rounding may exchange
    two of them.
    """
    output = differentiable_output(sample, outputs)
    if sample.operator == KL_LOSS:
        return torch.full_like(output, -2)
    generator = torch.Generator().manual_seed(0)
    if sample.operator != "lightning_indexer":
        return torch.randn(output.shape, generator=generator).to(output.dtype)
    keys = max(1, sample.inputs["key"].shape[-3])
    of_key = torch.randn((*output.shape[:-1], keys), generator=generator).to(output.dtype)
    return of_key.gather(-1, outputs[0].clamp(min=0).long())


def gradients(sample: Sample, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    leaf = sample.requires_grad(names)
    outputs = leaf.call(torch.ops.ascend)
    d_output = incoming_gradient(sample, outputs)
    leaves = [leaf.tensors[name] for name in names]
    return torch.autograd.grad(differentiable_output(sample, outputs), leaves, d_output)


def reference_gradients(sample: Sample, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """In fp64. The reference of the loss states its gradients."""
    leaf = sample.double().requires_grad(names)
    outputs = leaf.call(reference)
    d_output = incoming_gradient(leaf, outputs)
    if sample.operator == KL_LOSS:
        return tuple(d_output * gradient for gradient in outputs[:3])
    leaves = [leaf.tensors[name] for name in names]
    output = differentiable_output(sample, outputs)
    if not output.requires_grad:  # no query of this sample sees a key
        return tuple(torch.zeros_like(x) for x in leaves)
    return torch.autograd.grad(output, leaves, d_output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_recipe
def test_gradients_are_those_of_the_reference(recipe: Recipe, dtype: torch.dtype) -> None:
    """Not in half precision, where the backward starts from a rounded `out`: see the next test."""
    sample = recipe.make(dtype)
    names = differentiable_names(sample)
    actual, expected = gradients(sample, names), reference_gradients(sample, names)
    for name, x, y in zip(names, actual, expected, strict=True):
        assert x.dtype == dtype
        assert_close(f"gradient of {name}", x, y, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_recipe
def test_backward_is_the_grad_operator(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    outputs = sample.call(torch.ops.ascend)
    d_output = incoming_gradient(sample, outputs)
    inputs, options = sample.inputs, dict(sample.options)
    if sample.operator == KL_LOSS:
        results = tuple((d_output * gradient).to(gradient.dtype) for gradient in outputs[:3])
    elif sample.operator == "lightning_indexer":
        del options["sparse_count"], options["return_values"]
        q, k, w = sample.args
        results = torch.ops.ascend.lightning_indexer_grad(q, k, d_output, outputs[0], w, **options)
    elif sample.operator == "flash_attention_score":
        out, *statistics = outputs
        results = torch.ops.ascend.flash_attention_score_grad(
            *sample.args, d_output, *statistics, out, **options
        )
    else:
        results = torch.ops.ascend.sparse_flash_attention_grad(
            *sample.args, d_output, *outputs, **options
        )
    expected = dict(zip(DIFFERENTIABLE[sample.operator], results, strict=True))
    if inputs.get("value") is not None and inputs["value"] is inputs["key"]:
        expected["key"] = expected["value"] = expected["key"] + expected["value"]
    names = differentiable_names(sample)
    assert_same_bits(gradients(sample, names), tuple(expected[name] for name in names))


@each_recipe
def test_gradcheck(recipe: Recipe) -> None:
    if not recipe.gradcheck:
        pytest.skip("the stated gradient is not that of the loss: spec, section 8")
    sample = recipe.make(torch.float64)
    if any(x.numel() == 0 for x in sample.tensors.values()):
        pytest.skip("nothing to perturb")
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)

    def function(*leaves: Tensor) -> Tensor:
        call = leaf.replace(**dict(zip(names, leaves, strict=True)))
        outputs = call.call(torch.ops.ascend)
        # The padding of the indexer's values is -inf, which has no difference.
        return differentiable_output(sample, outputs).masked_fill(
            differentiable_output(sample, outputs) == -torch.inf, 0
        )

    leaves = tuple(leaf.tensors[name] for name in names)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-6)


@each_operator
def test_gradcheck_of_every_element(recipe: Recipe) -> None:
    sample = recipe.make(torch.float64)
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)

    def function(*leaves: Tensor) -> Tensor:
        call = leaf.replace(**dict(zip(names, leaves, strict=True)))
        output = differentiable_output(sample, call.call(torch.ops.ascend))
        return output.masked_fill(output == -torch.inf, 0).sum(-1)

    leaves = tuple(leaf.tensors[name] for name in names)
    assert torch.autograd.gradcheck(function, leaves)


@each_operator
def test_one_input_alone(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    names = differentiable_names(sample)
    together = gradients(sample, names)
    for name, gradient in zip(names, together, strict=True):
        assert_same_bits(gradients(sample, (name,)), (gradient,))


@each_operator
def test_what_carries_no_gradient(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    leaf = sample.requires_grad(differentiable_names(sample))
    carried = DIFFERENTIABLE_OUTPUT[sample.operator]
    outputs = leaf.call(torch.ops.ascend)
    assert [x.requires_grad for x in outputs] == [i == carried for i in range(len(outputs))]
    assert not any(x.requires_grad for x in sample.call(torch.ops.ascend))
    with torch.no_grad():
        assert not any(x.requires_grad for x in leaf.call(torch.ops.ascend))

    others = [
        name
        for name, x in sample.tensors.items()
        if x.is_floating_point() and name not in DIFFERENTIABLE[sample.operator]
    ]
    for name in others:
        outputs = sample.requires_grad((name,)).call(torch.ops.ascend)
        assert not any(x.requires_grad for x in outputs), name


@each_operator
def test_undefined_gradient(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    leaf = sample.requires_grad(differentiable_names(sample))
    output = differentiable_output(sample, leaf.call(torch.ops.ascend))
    torch._C._functions.UndefinedGrad()(output).sum().backward()
    for name in differentiable_names(sample):
        gradient = leaf.tensors[name].grad
        assert gradient is None or not gradient.any()


@each_operator
def test_expanded_gradient(recipe: Recipe) -> None:
    """The gradient of a sum has no memory of its own."""
    sample = recipe.make(torch.float32)
    if sample.operator == "lightning_indexer":
        sample = sample.replace(sparse_count=1, sparse_mode=0)  # no padding
    results = []
    for ones in (Tensor.sum, lambda x: (x * torch.ones_like(x)).sum()):
        leaf = sample.requires_grad(differentiable_names(sample))
        ones(differentiable_output(sample, leaf.call(torch.ops.ascend))).backward()
        results.append(tuple(leaf.tensors[name].grad for name in differentiable_names(sample)))
    assert_same_bits(*results)


@each_operator
def test_second_derivative(recipe: Recipe) -> None:
    sample = recipe.make(torch.float64)
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    outputs = leaf.call(torch.ops.ascend)
    d_output = incoming_gradient(sample, outputs).requires_grad_()
    leaves = [leaf.tensors[name] for name in names]

    def differentiate_twice() -> None:
        first = torch.autograd.grad(
            differentiable_output(sample, outputs), leaves, d_output, create_graph=True
        )
        torch.autograd.grad(sum(x.sum() for x in first), leaves)

    with pytest.raises(NotImplementedError, match=r"^ascend::\w+: .*derivative"):
        differentiate_twice()


@each_operator
def test_deterministic_algorithms(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16)
    names = differentiable_names(sample)
    expected = gradients(sample, names)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(gradients(sample, names), expected)
    finally:
        torch.use_deterministic_algorithms(False)


ANY = [next(r for r in RECIPES if r.operator == x) for x in (*DIFFERENTIABLE, PROMPT)]


@pytest.mark.parametrize("recipe", ANY, ids=lambda recipe: recipe.operator)
def test_forward_mode_is_refused(recipe: Recipe) -> None:
    """Or else the outputs would be constants to it."""
    sample = recipe.make(torch.float32)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"gradient: .* forward-mode .* got a dual tensor"),
    ):
        sample.map(lambda x: forward_ad.make_dual(x, x) if x.is_floating_point() else x).call(
            torch.ops.ascend
        )
