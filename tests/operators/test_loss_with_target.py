"""lightning_indexer_kl_loss of a target that is given."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.check.samples.sparse_lightning_indexer_kl_loss_grad import build
from support.samples import Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

BSND = SparseCase(s=(23, 5), k=4, ratio=4)
TND = SparseCase(layout="TND", lengths=((13, 0, 3, 8), (3, 0, 0, 2)), tail=(2, 1), ratio=4, k=3)
TRAINED = ("query_index", "key_index", "weights")

each_case = pytest.mark.parametrize("case", [BSND, TND], ids=lambda case: case.layout)


def loss_of(sample: Sample, **options: Any) -> Tensor:
    inputs = dict(sample.inputs)
    target = inputs.pop("attn_softmax_l1_norm")
    return ops.lightning_indexer_kl_loss(
        None, None, **inputs, target=target, **{**sample.options, **options}
    )


def gradients(sample: Sample, **options: Any) -> tuple[Tensor, ...]:
    """The loss, and its gradients."""
    leaf = sample.requires_grad(TRAINED)
    loss = loss_of(leaf, **options)
    loss.backward()
    return loss.detach(), *(leaf.inputs[name].grad for name in TRAINED)


def expected(sample: Sample) -> Tensor:
    """By the softmax that the operator returns."""
    *_, softmax = sample.call(torch.ops.ascend)
    p = sample.inputs["attn_softmax_l1_norm"]
    terms = p * (p.clamp(min=1e-8).log() - softmax.clamp(min=1e-8).log())
    return torch.where(p > 0, terms, 0).sum()


@each_case
def test_loss_and_gradients_are_those_of_the_operator(case: SparseCase) -> None:
    sample = build(case, torch.float64)
    loss, *actual = gradients(sample)
    torch.testing.assert_close(loss, expected(sample))
    assert loss.shape == ()
    for x, y in zip(actual, sample.call(torch.ops.ascend), strict=False):
        torch.testing.assert_close(x, y)


def test_gradients_are_those_of_finite_differences() -> None:
    sample = build(BSND, torch.float64)
    inputs = tuple(sample.requires_grad(TRAINED).inputs[name] for name in TRAINED)

    def loss(*given: Tensor) -> Tensor:
        return loss_of(sample.replace(**dict(zip(TRAINED, given, strict=True))))

    assert torch.autograd.gradcheck(loss, inputs)


@each_case
def test_a_scaled_loss_has_scaled_gradients(case: SparseCase) -> None:
    """As a loss scaler, and the accumulation of gradients, scale it."""
    sample = build(case, torch.bfloat16)
    _, *once = gradients(sample)
    leaf = sample.requires_grad(TRAINED)
    for _ in range(2):
        (loss_of(leaf) * 1024).backward()
    for name, gradient in zip(TRAINED, once, strict=True):
        torch.testing.assert_close(leaf.inputs[name].grad, gradient * 2048)
        assert gradient.dtype == leaf.inputs[name].dtype


@each_case
def test_a_normalized_target_gives_rows_equal_weight(case: SparseCase) -> None:
    sample = build(case, torch.float64)
    target = sample.inputs["attn_softmax_l1_norm"]
    mass = target.sum(-1, keepdim=True)
    normalized = sample.replace(attn_softmax_l1_norm=target / torch.where(mass == 0, 1, mass))
    actual = gradients(sample, normalize_target=True)
    torch.testing.assert_close(actual, gradients(normalized))


@each_case
def test_weights_of_tokens_are_factors(case: SparseCase) -> None:
    sample = build(case, torch.float64)
    random = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 3, case.tokens(0), generator=random).double()
    total = [torch.zeros_like(x) for x in gradients(sample)]
    for factor in (1, 2):
        for i, x in enumerate(gradients(sample, token_weight=weight == factor)):
            total[i] += factor * x
    torch.testing.assert_close(gradients(sample, token_weight=weight), total)


@each_case
def test_mean_is_over_the_tokens_of_sequences(case: SparseCase) -> None:
    sample = build(case, torch.float64)
    tokens = 24 if case is TND else 46
    torch.testing.assert_close(loss_of(sample, reduction="mean"), loss_of(sample) / tokens)
    torch.testing.assert_close(loss_of(sample, normalizer=5.0), loss_of(sample) / 5)
    weight = torch.zeros(case.tokens(0), dtype=torch.float64)
    assert loss_of(sample, token_weight=weight, reduction="mean") == 0
    weight[..., 1] = 3
    mean = loss_of(sample, token_weight=weight, reduction="mean")
    weighted = 3 if case is TND else 6
    torch.testing.assert_close(mean, loss_of(sample, token_weight=weight) / weighted)


def test_counts_of_a_padded_batch() -> None:
    case = SparseCase(b=3, s=(9, 4), lengths=((9, 5, 0), (4, 2, 0)), ratio=2)
    sample = build(case, torch.float64)
    torch.testing.assert_close(loss_of(sample, reduction="mean"), loss_of(sample) / 14)


def test_nothing_is_recorded_without_gradients() -> None:
    sample = build(BSND, torch.bfloat16)
    with torch.no_grad():
        assert not loss_of(sample.requires_grad(TRAINED)).requires_grad
    assert not loss_of(sample).requires_grad


def test_the_target_has_no_gradient() -> None:
    sample = build(BSND, torch.float64).requires_grad(("attn_softmax_l1_norm", "weights"))
    loss_of(sample).backward()
    assert sample.inputs["attn_softmax_l1_norm"].grad is None


def test_second_derivatives_are_refused() -> None:
    leaf = build(BSND, torch.float64).requires_grad(TRAINED)
    with pytest.raises(NotImplementedError, match="gradient: expected a first derivative"):
        torch.autograd.grad(loss_of(leaf), leaf.inputs["weights"], create_graph=True)


def test_nothing_waits_for_the_device() -> None:
    """A meta tensor has no value."""
    for case in (BSND, TND):
        sample = build(case, torch.bfloat16).to("meta")
        for options in ({"reduction": "mean"}, {"normalize_target": True}):
            assert loss_of(sample, **options).is_meta


@each_case
def test_compiled(case: SparseCase) -> None:
    sample = build(case, torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda leaf: loss_of(leaf), backend="aot_eager", fullgraph=True)
    leaf = sample.requires_grad(TRAINED)
    compiled(leaf).backward()
    for name, y in zip(TRAINED, gradients(sample)[1:], strict=True):
        torch.testing.assert_close(leaf.inputs[name].grad, y)
