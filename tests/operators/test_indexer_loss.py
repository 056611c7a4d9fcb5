"""lightning_indexer_kl_loss: weights of tokens, and what the sum is divided by."""

from __future__ import annotations

import math
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import reference
from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.operators._indexer_loss import normalized
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

each_case = pytest.mark.parametrize("case", [BSND, PADDED, TND], ids=lambda case: case.id)


def sample_of(case: SparseCase, dtype: torch.dtype = torch.float64) -> Sample:
    return KL_LOSS.make(case, dtype)


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
    return ops.lightning_indexer_kl_loss(**sample.arguments, **options)


def gradients(sample: Sample, **options: Any) -> tuple[Tensor, ...]:
    """The loss, and its gradients."""
    leaf = sample.requires_grad(TRAINED)
    loss = loss_of(leaf, **options)
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
    KL_LOSS.assert_matches_reference(far, far.call(torch.ops.ascend))


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


@each_case
def test_mean(case: SparseCase) -> None:
    sample, weight = sample_of(case), weight_of(case, torch.float64)
    valid = valid_tokens(case)
    total, mean = gradients(sample), gradients(sample, reduction="mean")
    for x, y in zip(mean, total, strict=True):
        torch.testing.assert_close(x, y / valid.sum())
    # The padding's weights do not count, whatever they are.
    weight[~valid] = torch.nan
    total, mean = (gradients(sample, token_weight=weight, reduction=x) for x in ("sum", "mean"))
    for x, y in zip(mean, total, strict=True):
        torch.testing.assert_close(x, y / weight[valid].sum())


def test_mean_of_nothing_is_zero() -> None:
    nothing = torch.zeros(BSND.tokens(0), dtype=torch.bool)
    for x in gradients(sample_of(BSND), token_weight=nothing, reduction="mean"):
        assert not x.any()
    empty = SparseCase(b=2, s=(6, 9), lengths=((0, 0), (0, 0)))
    for x in gradients(sample_of(empty), reduction="mean"):
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
    "normalizer",
    [5.0, 5, np.float32(5), torch.tensor(5.0), torch.tensor([5])],
    ids=["float", "int", "numpy", "0-d", "1-d"],
)
def test_normalizer_divides_the_sum(normalizer: Any) -> None:
    sample = sample_of(TND)
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


def test_normalizer_is_read_on_its_device() -> None:
    """A meta tensor has no value: an operation that waited for the device would fail."""
    sample = sample_of(BSND).to("meta")
    weight, normalizer = torch.ones(2, 6, device="meta"), torch.ones((), device="meta")
    assert loss_of(sample, token_weight=weight, normalizer=normalizer).is_meta
    assert loss_of(sample, token_weight=weight, reduction="mean").is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_weights(device: str) -> None:
    sample = sample_of(BSND, torch.bfloat16).to(device)

    def refused(weight: Tensor) -> Any:
        return sample.given(token_weight=weight).call(torch.ops.ascend)

    name = "^ascend::sparse_lightning_indexer_grad_kl_loss: token_weight: expected "
    with pytest.raises(ValueError, match=name + r"shape \(B, S1\)"):
        refused(torch.ones(2, 7, device=device))
    with pytest.raises(ValueError, match=name):
        refused(torch.ones(2, 6, 1, device=device))
    with pytest.raises(TypeError, match=name + "dtype bool or a floating point dtype, got int64"):
        refused(torch.ones(2, 6, dtype=torch.int64, device=device))


def test_weight_has_no_gradient() -> None:
    weight = torch.ones(BSND.tokens(0), dtype=torch.float64, requires_grad=True)
    leaf = sample_of(BSND).requires_grad(TRAINED)
    loss_of(leaf, token_weight=weight).backward()
    assert weight.grad is None
    assert not loss_of(sample_of(BSND), token_weight=weight).requires_grad


@each_case
def test_compiled(case: SparseCase) -> None:
    sample, weight = sample_of(case, torch.bfloat16), weight_of(case, torch.float32)
    options = {"token_weight": weight, "reduction": "mean"}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda sample: loss_of(sample, **options), backend="aot_eager", fullgraph=True
    )
    assert_same_bits((compiled(sample),), (loss_of(sample, **options),))
