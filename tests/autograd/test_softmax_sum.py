"""Gradients through softmax_sum of dense attention, which are those of the log-sum-exp."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import qkv, to_layout
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SQ, SKV, D, DR = 2, 2, 1, 3, 2, 2, 1
PACK = {"actual_seq_lengths_query": [2, 6], "actual_seq_lengths_key": [3, 4]}
PADDED = {"actual_seq_lengths_query": [3, 1], "actual_seq_lengths_key": [1, 2]}
EXTRAS = {"plain": {}, "causal": {"sparse_mode": 3}, "band": {"sparse_mode": 4, "pre_tokens": 1}}


def leaves(layout: str, ropes: bool, sink: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (to_layout(x, layout) if len(shape) == 4 else x).requires_grad_()

    made = {"query": leaf(B, N, SQ, D), "key": leaf(B, NK, SKV, D), "value": leaf(B, NK, SKV, D)}
    if ropes:
        made |= {"query_rope": leaf(B, N, SQ, DR), "key_rope": leaf(B, NK, SKV, DR)}
    return made | ({"sink": leaf(N)} if sink else {})


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize(("ropes", "sink"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("layout", "lengths"), [("BNSD", {}), ("BSH", PADDED), ("SBH", PADDED), ("TND", PACK)]
)
def test_gradcheck(
    layout: str, lengths: dict[str, Any], ropes: bool, sink: bool, extras: str
) -> None:
    """GQA, and rows without keys."""
    given = leaves(layout, ropes, sink)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, maximum, total = ops.flash_attention_score(
            **dict(zip(given, tensors, strict=True)), num_heads=N, layout=layout, **lengths,
            **EXTRAS[extras],
        )  # fmt: skip
        lse = ops.log_sum_exp(maximum, total)[..., 0]
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(function, list(given.values()))


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("parts", [(4, 5), (0, 9), (3, 3, 3)], ids=str)
def test_parts_of_the_keys_merge(parts: tuple[int, ...], key_heads: int) -> None:
    given = [x.requires_grad_() for x in qkv(6, 9, key_heads)]
    query, key, value = given
    outs, lses = [], []
    for k, v in zip(key.split(parts, 2), value.split(parts, 2), strict=True):
        out, maximum, total = ops.flash_attention_score(query, k, v, layout="BNSD")
        outs.append(out.flatten(0, 2))
        lses.append(ops.log_sum_exp(maximum, total)[..., 0].flatten())
    merged, _ = ops.attention_update(lses, outs)
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(merged.view_as(expected), expected)
    d_out = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(merged, given, d_out.view_as(merged)),
        torch.autograd.grad(expected, given, d_out),
    )
