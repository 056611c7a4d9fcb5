"""Softmax statistics: their log-sum-exp in every layout, their order in packs."""

from __future__ import annotations

import itertools
import math

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops._statistics import by_head, by_sequence

pytestmark = pytest.mark.usefixtures("no_limits")

FLT_MAX = torch.finfo(torch.float32).max


def test_on_paper() -> None:
    """exp(2) * 3 is the sum of the exponentials; two rows have no key."""
    softmax_max = torch.tensor([2.0, 0.0, 0.0, -FLT_MAX, -1e30])
    softmax_sum = torch.tensor([3.0, 1.0, 0.0, FLT_MAX, 1.0])
    lse = ops.log_sum_exp(softmax_max, softmax_sum)
    expected = torch.tensor([2 + math.log(3), 0.0, -math.inf, -math.inf, -1e30])
    torch.testing.assert_close(lse, expected, rtol=1e-7, atol=0)
    assert lse.dtype == torch.float32


def test_gradients_on_paper() -> None:
    """1 and 1 / sum; nothing depends on a row without keys."""
    softmax_max = torch.tensor([2.0, 0.0, -FLT_MAX], requires_grad=True)
    softmax_sum = torch.tensor([4.0, 0.0, FLT_MAX], requires_grad=True)
    lse = ops.log_sum_exp(softmax_max, softmax_sum)
    gradients = torch.autograd.grad(lse, (softmax_max, softmax_sum), torch.ones(3))
    assert [x.tolist() for x in gradients] == [[1.0, 0.0, 0.0], [0.25, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_dense_attention(layout: str, dtype: torch.dtype) -> None:
    """Causal to the bottom right: of five queries on three keys, the first two see none."""
    query, key = torch.randn(2, 3, 5, 16, dtype=dtype), torch.randn(2, 3, 3, 16, dtype=dtype)
    scores = (query.double() @ key.double().mT / 4).masked_fill(
        ~torch.ones(5, 3, dtype=torch.bool).tril(-2), -torch.inf
    )
    if layout == "BSND":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    _, *statistics = ops.flash_attention_score(
        query, key, key, num_heads=3, layout=layout, sparse_mode=3
    )
    lse = ops.log_sum_exp(*statistics)
    assert lse.shape == (2, 3, 5, 8)
    expected = scores.logsumexp(-1).to(dtype)
    assert expected[:, :, :2].isneginf().all()
    torch.testing.assert_close(lse, expected[..., None].expand(-1, -1, -1, 8))


def test_packed_attention() -> None:
    """Lengths 2 and 3, of keys 4 and none, and a token after them."""
    query, key = torch.randn(6, 2, 16), torch.randn(4, 2, 16)
    _, *statistics = ops.flash_attention_score(
        query, key, key, num_heads=2, layout="TND", actual_seq_lengths_query=[2, 5],
        actual_seq_lengths_key=[4, 4],
    )  # fmt: skip
    lse = ops.log_sum_exp(*statistics)
    assert lse.shape == (6, 2, 8)
    by_tokens = by_head(lse[..., 0], [2, 5])
    expected = (query[:2].transpose(0, 1) @ key.permute(1, 2, 0) / 4).logsumexp(-1)
    torch.testing.assert_close(by_tokens[:, :2], expected)
    assert by_tokens[:, 2:5].isneginf().all()


@pytest.mark.parametrize("packed", [False, True])
def test_sparse_attention(packed: bool) -> None:
    """Two of four keys are selected, and none for the last query. Statistics have no lanes."""
    query, key = torch.randn(1, 3, 8, 16), torch.randn(1, 4, 1, 16)
    indices = torch.tensor([[0, 1], [3, 1], [-1, -1]], dtype=torch.int32).view(1, 3, 1, 2)
    options = {"scale_value": 0.25, "sparse_mode": 0, "query_rope": None, "key_rope": None}
    tensors = [query, key, key, indices]
    if packed:
        tensors = [x[0] for x in tensors]
        options |= {
            "layout": "TND", "actual_seq_lengths_query": [3], "actual_seq_lengths_key": [4],
        }  # fmt: skip
    _, *statistics = ops.sparse_flash_attention(*tensors, **options)
    lse = ops.log_sum_exp(*statistics)
    assert lse.shape == ((1, 3, 8) if packed else (1, 1, 3, 8))
    scores = query[0] @ key[0, :, 0].T / 4
    expected = torch.stack([scores[0, :, [0, 1]], scores[1, :, [3, 1]]]).logsumexp(-1)
    rows = lse.view(3, 8)
    torch.testing.assert_close(rows[:2], expected)
    assert rows[2].isneginf().all()


def test_compiled_and_without_values() -> None:
    statistics = torch.randn(2, 5, 4, 8), torch.rand(2, 5, 4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(ops.log_sum_exp, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*statistics), ops.log_sum_exp(*statistics))
    assert ops.log_sum_exp(*(x.to("meta") for x in statistics)).shape == (2, 5, 4, 8)


@pytest.mark.parametrize("ends", [[3, 5, 9], [3, 3, 7], [3, 5, 0], [0]])
def test_the_order_of_packs(ends: list[int]) -> None:
    """Packs hold (N, length) of each sequence. After a closing 0, the rest is one sequence."""
    tokens, heads = 9, 2
    number = torch.arange(heads * tokens).view(heads, tokens)  # head * 9 + token
    bounds = [0, *(end for end in ends if end), tokens]
    pieces = [number[:, a:b].flatten() for a, b in itertools.pairwise(bounds)]
    stored = torch.cat(pieces).view(tokens, heads)
    assert torch.equal(by_head(stored, ends), number)
    assert torch.equal(by_sequence(number, ends), stored)
    lanes = stored[..., None].expand(-1, -1, 8)
    assert torch.equal(by_sequence(by_head(lanes, ends), ends), lanes)
