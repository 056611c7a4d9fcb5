"""The backward has the forward's weights, whatever the size of the scores."""

from __future__ import annotations

from dataclasses import replace

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.samples import flash_attention_score, sparse_flash_attention
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_ops import reference
from support import probabilities
from support.samples import Sample
from support.turns import by_turns
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The size of scores: about at the ends of these, a weight is off where its score is rounded in one
# direction and not in the other; where the maximum is rounded, and the score that it is of is not,
# the exponential overflows; and a float32 overflows.
each_size = pytest.mark.parametrize("size", [1.0, 1e4, 3e5, 1e9, 1e12, 1e20, 1e30, 1e36])

DENSE = [
    FlashCase(b=1, s=(40, 60), d=(64, 64), heads=(4, 2)),
    FlashCase(b=1, s=(1, 70), d=(128, 128), heads=(3, 3)),  # reads keys in place in half types
    FlashCase(layout="BSND", b=2, s=(5, 90), d=(192, 128), heads=(2, 1), mode=3),
    FlashCase(layout="TND", lengths=((3, 1, 0, 7), (5, 9, 4, 3)), d=(40, 40), mode=4),
    FlashCase(b=1, s=(9, 30), d=(33, 33), mode=1, mask="11", pattern="rows", heads=(1, 1)),
    FlashCase(b=1, s=(3, 600), d=(256, 256), heads=(2, 2)),
]  # fmt: skip
SPARSE = [
    SparseCase(b=1, s=(3, 100), heads=1, d=64, k=100, mode=0),
    SparseCase(b=2, s=(5, 80), heads=5, d=192, rope=40, k=70),
    SparseCase(b=1, s=(4, 300), heads=16, d=128, rope=64, k=300, mode=0),
]


def with_scores_of(size: float, sample: Sample) -> Sample:
    """Half of it from query and key, as far as the dtype has the numbers."""
    largest = torch.finfo(sample.inputs["query"].dtype).max / 8
    factor = min(size**0.5, largest)
    names = ("query", "key", "query_rope", "key_rope")
    scaled = {name: sample.tensors[name] * factor for name in names if name in sample.tensors}
    scale = sample.options["scale_value"] * (size**0.5 / factor) ** 2
    return sample.replace(**scaled, scale_value=scale)


@by_turns(4)
@each_dtype
@each_size
@pytest.mark.parametrize("case", [*DENSE, *SPARSE], ids=lambda case: case.id)
def test_weights(case: FlashCase | SparseCase, size: float, dtype: torch.dtype) -> None:
    if isinstance(case, FlashCase):
        sample, one_block = flash_attention_score.build(case, dtype), case.s[1] <= 512
        weights = probabilities.dense(with_scores_of(size, sample))
    else:
        sample, one_block = sparse_flash_attention.build(case, dtype), case.k <= 128
        weights = probabilities.sparse(with_scores_of(size, sample))
    weights.assert_same(exact=one_block and dtype != torch.bfloat16)
    weights.assert_rows_add_up()


@by_turns(4)
@each_dtype
@each_size
@pytest.mark.parametrize("case", [replace(x, mode=3) for x in SPARSE], ids=lambda case: case.id)
def test_target_of_the_loss(case: SparseCase, size: float, dtype: torch.dtype) -> None:
    """The mean over heads of the weights of attention. An indexer with equal scores has the same
    weight for every key, and the gradient of its keys is the difference."""
    sample = with_scores_of(size, sparse_flash_attention.build(case, dtype))
    weights = probabilities.sparse(sample)
    batch, (queries, keys) = case.b, case.s
    unit = torch.eye(queries, dtype=dtype).view(1, queries, 1, queries).expand(batch, -1, -1, -1)
    _, softmax_max, softmax_sum = weights.outputs
    names = ("query_rope", "key_rope")
    d_key_index = torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(
        sample.inputs["query"], sample.inputs["key"], unit.contiguous(),
        torch.ones(batch, keys, 1, queries, dtype=dtype),
        torch.ones(batch, queries, 1, dtype=dtype), sample.inputs["sparse_indices"],
        softmax_max, softmax_sum, scale_value=sample.options["scale_value"], layout="BSND",
        sparse_mode=3, **{name: sample.options[name] for name in names},
    )[1]  # fmt: skip
    of_indexer = torch.zeros(batch, queries, keys, dtype=torch.float64)
    for b, i in torch.cartesian_prod(torch.arange(batch), torch.arange(queries)).tolist():
        kept = sample.inputs["sparse_indices"][b, i, 0]
        kept = kept[kept >= 0].long()
        of_indexer[b, i, kept] = 1 / kept.numel()
    target = of_indexer - d_key_index[:, :, 0].transpose(1, 2).double()
    expected = weights.forward.mean(2)
    unit_of = probabilities.UNIT[dtype]
    assert float((target - expected).abs().max()) <= 8 * unit_of
    assert float((target.sum(-1) - 1).abs().max()) <= 32 * unit_of


def test_weights_of_zero_are_noticed() -> None:
    weights = probabilities.dense(flash_attention_score.build(DENSE[0], torch.float32))
    zero = torch.zeros_like(weights.forward)
    with pytest.raises(AssertionError, match="sum is off by 1"):
        replace(weights, forward=zero, backward=zero).assert_rows_add_up()


@each_dtype
def test_gate_of_the_indexer(dtype: torch.dtype) -> None:
    """With one head of weight 1 a score is its product, or 0; the gradient of the weight is the
    product that the backward has, and that of the query is there where it is positive."""
    torch.manual_seed(0)
    query = torch.randn(1, 6, 1, 192).to(dtype)
    key = torch.randn(1, 40, 1, 192).to(dtype)
    key[:, 20:] = -key[:, :20]  # products are positive for one of two
    weights = torch.ones(1, 6, 1, dtype=dtype)
    options = {"layout": "BSND", "sparse_mode": 0}
    indices, values = torch.ops.ascend.lightning_indexer(
        query, key, weights, sparse_count=40, return_values=True, **options
    )
    for slot in range(40):
        one = torch.full_like(indices, -1)
        one[..., 0] = indices[..., slot]
        d_values = torch.ones_like(values)
        d_query, _, d_weights = torch.ops.ascend.lightning_indexer_grad(
            query, key, d_values, one, weights, **options
        )
        assert torch.equal(d_weights[..., 0], values[..., 0, slot])
        assert torch.equal(d_query.abs().sum(-1) > 0, values[..., slot] > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [10, 100, 300, 1000, 3000, 10000, 1e7, 1e12])
def test_gradients_of_values(size: float, dtype: torch.dtype) -> None:
    """Within 1e-2 of the largest, dense and sparse, of the reference in float64."""
    case = FlashCase(layout="BSND", b=1, s=(64, 64), heads=(2, 1), d=(128, 128))
    sample = flash_attention_score.build(case, dtype)
    inputs = {name: sample.inputs[name] for name in ("query", "key", "value")}
    inputs |= {name: size * inputs[name] for name in ("query", "key")}
    every_key = torch.arange(64, dtype=torch.int32).repeat(1, 64, 1, 1)
    options = {"scale_value": 128**-0.5, "sparse_mode": 0}
    sparse = Sample("sparse_flash_attention", "", {**inputs, "sparse_indices": every_key}, options)
    for forward in (sample.replace(**inputs), sparse):
        d_value, exact = (
            d_value_of(x, n) for x, n in ((forward, ascend_attn_ops), (forward.double(), reference))
        )
        assert float((d_value.double() - exact).abs().max()) <= 1e-2 * float(exact.abs().max())


def d_value_of(sample: Sample, namespace: object) -> Tensor:
    leaf = sample.requires_grad(["value"])
    out = leaf.call(namespace)[0]
    return torch.autograd.grad(out, leaf.inputs["value"], torch.ones_like(out))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_of_other_statistics_are_at_most_1(dtype: torch.dtype) -> None:
    """The weights of a maximum that another machine rounded another way."""
    sample = with_scores_of(1e9, flash_attention_score.build(DENSE[0], dtype))
    out, softmax_max, softmax_sum = sample.call(torch.ops.ascend)
    call = flash_attention_score.gradient_call(
        sample, (out, softmax_max * (1 - 1e-6), softmax_sum), torch.ones_like(out)
    )
    rows = sample.inputs["query"].shape[2] * 2
    assert float(call.call(torch.ops.ascend)[2].max()) <= rows
