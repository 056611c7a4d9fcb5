"""lightning_indexer_kl_loss: weights of tokens, what the sum is divided by, and targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_lightning_indexer_kl_loss_grad import build
from ascend_attn_ops import reference
from ascend_attn_ops.ops._indexer_loss import normalized
from support.samples import OPERATORS, Sample
from support.tolerance import TOLERANCES, assert_close, assert_same_bits
from torch import Tensor

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.usefixtures("no_limits")

KL_LOSS = OPERATORS["sparse_lightning_indexer_grad_kl_loss"]
BSND = SparseCase(s=(6, 9), rope=8)
PADDED = SparseCase(s=(6, 9), lengths=((6, 3), (9, 5)), rope=8)
TND = SparseCase(layout="TND", lengths=((3, 0, 6), (5, 2, 9)), tail=(2, 3), rope=8)
TRAINED = ("query_index", "key_index", "weights")

# With a target that is given.
CMP_BSND = SparseCase(s=(23, 5), k=4, ratio=4)
CMP_TND = SparseCase(layout="TND", lengths=((13, 0, 3, 8), (3, 0, 0, 2)), tail=(2, 1), ratio=4, k=3)
CMP_PADDED = SparseCase(b=3, s=(9, 4), lengths=((9, 5, 0), (4, 2, 0)), ratio=2)


def each(*cases: SparseCase) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


each_case = each(BSND, PADDED, TND)
each_compressed = each(CMP_BSND, CMP_TND)
every_case = each(BSND, PADDED, TND, CMP_BSND, CMP_TND, CMP_PADDED)


def sample_of(case: SparseCase, dtype: torch.dtype = torch.float64) -> Sample:
    return build(case, dtype) if case.ratio > 1 else KL_LOSS.make(case, dtype)


def weight_of(case: SparseCase, dtype: torch.dtype) -> Tensor:
    """A third of it is zero."""
    shape = case.tokens(0)
    weight = (torch.arange(math.prod(shape)) % 3).view(shape)
    return weight.to(dtype) if dtype == torch.bool else weight.to(dtype) / 2


def valid_tokens(case: SparseCase) -> Tensor:
    """Which query tokens belong to a sequence."""
    if case.layout == "TND":
        assert case.lengths is not None
        return torch.arange(case.tokens(0)[0]) < sum(case.lengths[0])
    lengths = torch.tensor(case.length_list(0) or [case.s[0]] * case.b)
    return torch.arange(case.s[0]) < lengths[:, None]


def loss_of(sample: Sample, **options: Any) -> Tensor:
    given = {**sample.arguments, **options}
    if "attn_softmax_l1_norm" in given:
        given.update(query=None, key=None, target=given.pop("attn_softmax_l1_norm"))
    return ops.lightning_indexer_kl_loss(**given)


def gradients(
    sample: Sample, call: Callable[..., Tensor] = loss_of, **options: Any
) -> tuple[Tensor, ...]:
    """The loss, and its gradients."""
    leaf = sample.requires_grad(TRAINED)
    loss = call(leaf, **options)
    loss.backward()
    return loss.detach(), *(leaf.tensors[name].grad for name in TRAINED)


@each_case
@pytest.mark.parametrize(
    "weight_dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_weight_is_that_of_the_reference(case: SparseCase, weight_dtype: torch.dtype) -> None:
    sample, weight = sample_of(case), weight_of(case, weight_dtype)
    *expected_gradients, expected = sample.given(token_weight=weight).call(reference)
    loss, *actual = gradients(sample, token_weight=weight)
    assert_close("loss", loss, expected.squeeze(), TOLERANCES[torch.float64])
    for name, x, y in zip(TRAINED, actual, expected_gradients, strict=True):
        assert_close(name, x, y, TOLERANCES[torch.float64])


def test_probabilities_below_the_smallest_count_as_it() -> None:
    """Probabilities that the indexer gives to keys which the attention reads."""
    sample = sample_of(BSND)
    far = sample.replace(weights=1000 * sample.tensors["weights"])
    KL_LOSS.bounds.check(far, far.call(torch.ops.ascend))


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ones_change_nothing(case: SparseCase, dtype: torch.dtype) -> None:
    sample = sample_of(case, dtype)
    expected = gradients(sample)
    for weight in (torch.ones(case.tokens(0)), torch.ones(case.tokens(0), dtype=torch.bool)):
        assert_same_bits(gradients(sample, token_weight=weight), expected)


@each_case
def test_a_token_without_weight_is_not_read(case: SparseCase) -> None:
    sample, weight = sample_of(case), weight_of(case, torch.bool)
    expected = gradients(sample, token_weight=weight)
    spoilt = sample.clone()
    for name in ("query", "query_index", "weights"):
        spoilt.tensors[name][~weight] = torch.nan
    assert_same_bits(gradients(spoilt, token_weight=weight), expected)
    d_query_index = expected[1]
    assert not d_query_index[~weight].any()
    assert d_query_index[weight & valid_tokens(case)].any()


@every_case
def test_mean(case: SparseCase) -> None:
    sample, weight = sample_of(case), weight_of(case, torch.float64)
    valid = valid_tokens(case)
    total, mean = gradients(sample), gradients(sample, reduction="mean")
    torch.testing.assert_close(mean, tuple(x / valid.sum() for x in total))
    # The padding's weights do not count.
    weight[~valid] = torch.nan
    total, mean = (gradients(sample, token_weight=weight, reduction=x) for x in ("sum", "mean"))
    torch.testing.assert_close(mean, tuple(x / weight[valid].sum() for x in total))


@each(BSND, CMP_BSND, CMP_TND)
def test_mean_of_nothing_is_zero(case: SparseCase) -> None:
    nothing = torch.zeros(case.tokens(0), dtype=torch.bool)
    for x in gradients(sample_of(case), token_weight=nothing, reduction="mean"):
        assert not x.any()


def test_mean_of_no_tokens_is_zero() -> None:
    case = SparseCase(b=2, s=(6, 9), lengths=((0, 0), (0, 0)))
    for x in gradients(sample_of(case), reduction="mean"):
        assert not x.any()


@pytest.mark.parametrize(
    "zero", [0, -0.0, np.float32(0), torch.tensor(0)], ids=["int", "-0.0", "numpy", "tensor"]
)
def test_nothing_divided_by_a_normalizer_of_zero(zero: Any) -> None:
    nothing = torch.zeros(BSND.tokens(0), dtype=torch.bool)
    for x in gradients(sample_of(BSND), token_weight=nothing, normalizer=zero):
        assert not x.any()
    assert loss_of(sample_of(BSND), normalizer=zero).isinf()


def test_no_lengths_as_an_array() -> None:
    sample = sample_of(SparseCase(layout="TND", lengths=((), ())))
    none = np.array([], int)
    arguments = {**sample.arguments, "actual_seq_lengths_query": none}
    assert ops.lightning_indexer_kl_loss(**arguments, reduction="mean") == 0


@pytest.mark.parametrize(
    "normalizer", [5.0, 5, np.float32(5), torch.tensor(5.0), torch.tensor([5])],
    ids=["float", "int", "numpy", "0-d", "1-d"],
)  # fmt: skip
@each(TND, CMP_BSND, CMP_TND)
def test_normalizer_divides_the_sum(case: SparseCase, normalizer: Any) -> None:
    sample = sample_of(case)
    for x, y in zip(gradients(sample, normalizer=normalizer), gradients(sample), strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y / 5)


def test_a_normalizer_of_more_than_64_bits() -> None:
    normalizer = 10**30
    of_int = normalized(torch.ones(()), normalizer)
    assert of_int == normalized(torch.ones(()), float(normalizer))


def test_a_normalizer_that_would_round_to_zero() -> None:
    """By which a loss of 0, of no tokens, would be NaN."""
    with pytest.raises(ValueError, match="normalizer: expected 0 or a number that float32 holds"):
        normalized(torch.zeros(()), 1e-300)
    assert normalized(torch.zeros((), dtype=torch.float64), 1e-300) == 0


def test_nothing_waits_for_the_device() -> None:
    """A meta tensor has no value: an operation that waited for the device would fail."""
    for case in (CMP_BSND, CMP_TND):
        sample = sample_of(case, torch.bfloat16).to("meta")
        for options in ({"reduction": "mean"}, {"normalize_target": True}):
            assert loss_of(sample, **options).is_meta
    sample = sample_of(BSND).to("meta")
    weight, normalizer = torch.ones(2, 6, device="meta"), torch.ones((), device="meta")
    assert loss_of(sample, token_weight=weight, normalizer=normalizer).is_meta
    assert loss_of(sample, token_weight=weight, reduction="mean").is_meta


@each(BSND, CMP_BSND)
def test_nothing_but_the_indexer_has_a_gradient(case: SparseCase) -> None:
    sample, weight = sample_of(case), torch.ones(case.tokens(0), dtype=torch.float64)
    assert not loss_of(sample, token_weight=weight.requires_grad_()).requires_grad
    others = {"attn_softmax_l1_norm"} & sample.tensors.keys()
    leaf = sample.requires_grad((*TRAINED, *others))
    with torch.no_grad():
        assert not loss_of(leaf).requires_grad
    loss_of(leaf, token_weight=weight).backward()
    assert all(x.grad is None for x in (weight, *(leaf.tensors[name] for name in others)))


@every_case
def test_compiled(case: SparseCase) -> None:
    sample = sample_of(case, torch.bfloat16)
    for options in ({}, {"token_weight": weight_of(case, torch.float32), "reduction": "mean"}):
        torch._dynamo.reset()
        compiled = torch.compile(partial(loss_of, **options), backend="aot_eager", fullgraph=True)
        assert_same_bits(gradients(sample, compiled), gradients(sample, **options))


# A target that is given.


def expected(sample: Sample) -> Tensor:
    """By the softmax that the operator returns."""
    *_, softmax = sample.call(torch.ops.ascend)
    p = sample.inputs["attn_softmax_l1_norm"]
    terms = p * (p.clamp(min=1e-8).log() - softmax.clamp(min=1e-8).log())
    return torch.where(p > 0, terms, 0).sum()


@each_compressed
def test_loss_and_gradients_are_those_of_the_operator(case: SparseCase) -> None:
    sample = sample_of(case)
    loss, *actual = gradients(sample)
    torch.testing.assert_close(loss, expected(sample))
    assert loss.shape == ()
    for x, y in zip(actual, sample.call(torch.ops.ascend), strict=False):
        torch.testing.assert_close(x, y)


def test_gradients_are_those_of_finite_differences() -> None:
    sample = sample_of(CMP_BSND)
    inputs = tuple(sample.requires_grad(TRAINED).inputs[name] for name in TRAINED)

    def loss(*given: Tensor) -> Tensor:
        return loss_of(sample.replace(**dict(zip(TRAINED, given, strict=True))))

    assert torch.autograd.gradcheck(loss, inputs)


@each_compressed
def test_a_scaled_loss_has_scaled_gradients(case: SparseCase) -> None:
    """As a loss scaler, and the accumulation of gradients, scale it."""
    sample = sample_of(case, torch.bfloat16)
    _, *once = gradients(sample)
    leaf = sample.requires_grad(TRAINED)
    for _ in range(2):
        (loss_of(leaf) * 1024).backward()
    for name, gradient in zip(TRAINED, once, strict=True):
        torch.testing.assert_close(leaf.inputs[name].grad, gradient * 2048)
        assert gradient.dtype == leaf.inputs[name].dtype


@each_compressed
def test_a_normalized_target_gives_rows_equal_weight(case: SparseCase) -> None:
    sample = sample_of(case)
    target = sample.inputs["attn_softmax_l1_norm"]
    mass = target.sum(-1, keepdim=True)
    normalized = sample.replace(attn_softmax_l1_norm=target / torch.where(mass == 0, 1, mass))
    actual = gradients(sample, normalize_target=True)
    torch.testing.assert_close(actual, gradients(normalized))


@each_compressed
def test_weights_of_tokens_are_factors(case: SparseCase) -> None:
    sample = sample_of(case)
    random = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 3, case.tokens(0), generator=random).double()
    total = [torch.zeros_like(x) for x in gradients(sample)]
    for factor in (1, 2):
        for i, x in enumerate(gradients(sample, token_weight=weight == factor)):
            total[i] += factor * x
    torch.testing.assert_close(gradients(sample, token_weight=weight), total)


def test_second_derivatives_are_refused() -> None:
    leaf = sample_of(CMP_BSND).requires_grad(TRAINED)
    with pytest.raises(NotImplementedError, match="gradient: expected a first derivative"):
        torch.autograd.grad(loss_of(leaf), leaf.inputs["weights"], create_graph=True)
