"""Softmax statistics: their log-sum-exp, their order in packs."""

from __future__ import annotations

import itertools
import math

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops._statistics import by_head, by_sequence

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
