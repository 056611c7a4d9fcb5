"""Masks whose axes of 1 the public function of dense attention expands."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from support.attention import qkv, to_layout
from support.tolerance import assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, D = 2, 4, 16


def score(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return ascend_attn_ops.flash_attention_score(q, k, v, **options)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [(B, 1, 1, 9), (1, 1, 1, 9), (B, N, 1, 9), (1, N, 6, 9), (1, N, 1, 9), (B, 1, 6, 1)],
    ids=str,
)
def test_the_public_function_expands_masks(shape: tuple[int, ...], mode: int, layout: str) -> None:
    leaves = [x.requires_grad_() for x in qkv(6, 9)]
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    if shape[-1] > 1:
        kept[..., 0] = True
    else:
        kept[:, :, :2] = True
    query, key, value = (to_layout(x, layout) for x in leaves)
    options: dict[str, Any] = {"num_heads": N, "layout": layout, "sparse_mode": mode}
    out, *statistics = score(query, key, value, attn_mask=kept, **options)
    rows = kept.expand(B, N, 6, 9).any(-1, keepdim=True)
    dense = scaled_dot_product_attention(*leaves, attn_mask=kept)
    expected = to_layout(torch.where(rows, dense, 0), layout)
    torch.testing.assert_close(out, expected)
    d_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, leaves, d_out))
    inputs = [x.detach() for x in (query, key, value, d_out, *statistics, out)]
    gradients = ascend_attn_ops.flash_attention_score_grad(
        *inputs, atten_mask=~kept, scale_value=D**-0.5, **options
    )
    torch.testing.assert_close(gradients, tuple(to_layout(x, layout) for x in actual))


def test_masks_are_expanded_without_their_values() -> None:
    """A fake tensor has no values to read."""
    with FakeTensorMode() as fake:
        q, k, v = (fake.from_tensor(x) for x in qkv(6, 9))
        mask = fake.from_tensor(torch.zeros(B, 1, 1, 9, dtype=torch.bool))
        out, *_ = score(q, k, v, num_heads=N, layout="BNSD", atten_mask=mask)
        assert out.shape == q.shape


@pytest.mark.parametrize(
    ("dtype", "low"), [(torch.float16, -30000.0), (torch.bfloat16, -1e30)], ids=str
)
def test_padding_as_a_bias(dtype: torch.dtype, low: float) -> None:
    """A finite low score has the weight 0: results have the bits of the mask's."""
    q, k, v = (x.to(dtype) for x in qkv(6, 9))
    padding = torch.arange(9) >= torch.tensor([5, 8])[:, None]
    bias = torch.zeros(B, N, 1, 9, dtype=dtype).masked_fill(padding[:, None, None], low)
    options: dict[str, Any] = {"num_heads": N, "layout": "BNSD"}
    masked = score(q, k, v, atten_mask=padding[:, None, None], **options)
    assert_same_bits(score(q, k, v, pse_shift=bias, pse_type=0, **options), masked)


def pack(x: Tensor, lengths: list[int]) -> Tensor:
    """(B, N, S, D) in layout TND, without padding."""
    return torch.cat([y[:, :n].transpose(0, 1) for y, n in zip(x, lengths, strict=True)])


@pytest.mark.parametrize(
    "shape", [(B, 1, 1, 9), (1, 1, 1, 9), (1, N, 6, 9), (B, N, 1, 9), (1, N, 1, 9), (B, 1, 6, 1)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mode", [0, 1])
def test_masks_of_packs_are_expanded(shape: tuple[int, ...], mode: int) -> None:
    """To the longest sequences, and to the number of sequences."""
    q, k, v = qkv(6, 9)
    queries, keys = [6, 4], [5, 9]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    packed = pack(q, queries), pack(k, keys), pack(v, keys)
    options: dict[str, Any] = {
        "num_heads": N, "layout": "TND", "sparse_mode": mode, "scale_value": 0.3,
        "actual_seq_lengths_query": [6, 10], "actual_seq_lengths_key": [5, 14],
    }  # fmt: skip
    full = mask.expand(B, N, 6, 9).contiguous()
    expected = score(*packed, atten_mask=full, **options)
    actual = score(*packed, atten_mask=mask, **options)
    assert_same_bits(actual, expected)
    inputs = (*packed, expected[0], *expected[1:], expected[0])
    assert_same_bits(
        ascend_attn_ops.flash_attention_score_grad(*inputs, atten_mask=mask, **options),
        ascend_attn_ops.flash_attention_score_grad(*inputs, atten_mask=full, **options),
    )
