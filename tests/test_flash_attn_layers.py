"""flash-attn's padding and rotary embedding against plain torch, and the module in its place."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from ascend_attn_ops import flash_attn
from ascend_attn_ops.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from ascend_attn_ops.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from torch import Tensor
from torch.testing import assert_close

LENGTHS = [3, 0, 5]


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(6) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding(dtype: torch.dtype) -> None:
    x = torch.randn(3, 6, 2, 4, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask_of(LENGTHS).to(dtype))
    assert_close(tokens, torch.cat([y[:n] for y, n in zip(x, LENGTHS, strict=True)]))
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 3, 8], 5, LENGTHS)
    again = pad_input(tokens, indices, 3, 6)
    assert_close(again, x * mask_of(LENGTHS)[..., None, None])
    again.sum().backward()
    assert_close(x.grad, mask_of(LENGTHS)[..., None, None].expand_as(x).float())
    assert_close(index_first_axis(x.flatten(0, 1), indices), tokens)


def test_padding_with_tokens_that_are_not_used() -> None:
    x, attended = torch.randn(3, 6, 4), mask_of([1, 0, 5])
    unused = mask_of(LENGTHS) & ~attended
    tokens, _, cu_seqlens, longest, used = unpad_input(x, attended.long(), unused.long())
    assert (len(tokens), cu_seqlens.tolist(), longest) == (8, [0, 3, 3, 8], 5)
    assert used.tolist() == [1, 0, 5]
    with pytest.raises(ValueError, match=r"unpad_input: attention_mask: expected shape \[3, 6\]"):
        unpad_input(x, attended[:2])
    assert unpad_input(x[:0], attended[:0])[3] == 0


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """By complex numbers; angles: (..., rotary_dim / 2)."""
    size = 2 * angles.shape[-1]
    pairs = x[..., :size].double()
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).mT
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    out = pairs.flatten(-2) if interleaved else pairs.mT.flatten(-2)
    return torch.cat((out, x[..., size:].double()), -1)


@pytest.mark.parametrize("offsets", [0, 2, [4, 1]])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool, offsets: int | list[int]) -> None:
    x, angles = torch.randn(2, 5, 3, 8), torch.rand(9, 3).double()
    tables = angles.cos().float(), angles.sin().float()
    positions = torch.arange(5) + torch.tensor(offsets).reshape(-1, 1)
    expected = turned(x, angles[positions].unsqueeze(-2), interleaved)
    offset = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    options = {"interleaved": interleaved, "seqlen_offsets": offset}
    out = apply_rotary_emb(x, *tables, **options)
    assert_close(out, expected.float())
    packed = torch.cat([x[0, :2], x[1, :4]])
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    of_pack = apply_rotary_emb(packed, *tables, cu_seqlens=ends, max_seqlen=4, **options)
    assert_close(of_pack, torch.cat([out[0, :2], out[1, :4]]))
    assert apply_rotary_emb(x, *tables, inplace=True, **options) is x
    assert_close(x, out)


def test_rotary_errors() -> None:
    x, table = torch.randn(2, 5, 3, 8), torch.rand(9, 4)
    for arguments, error in (
        ((x[0], table, table), r"x: expected shape \(batch_size, seqlen, nheads, headdim\)"),
        ((x, torch.rand(9, 5), table), "cos: expected the shape of cos, at most 4 elements"),
        ((x, table, table[1:]), "sin: expected the shape of cos"),
    ):
        with pytest.raises(ValueError, match=f"apply_rotary_emb: {error}"):
            apply_rotary_emb(*arguments)
    with pytest.raises(IndexError):
        apply_rotary_emb(x, table[:3], table[:3])
    with pytest.raises(NotImplementedError, match="RotaryEmbedding: scale_base: expected None"):
        RotaryEmbedding(8, scale_base=512.0)


def test_rotary_embedding() -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    layer = RotaryEmbedding(6, base=100.0)
    exponents = torch.arange(0, 6, 2).double() / 6
    angles = torch.arange(3, 8).double()[:, None, None] * 100.0**-exponents
    turned_q, turned_k = (turned(x, angles, False).float() for x in (q, k))
    options = {"seqlen_offset": 3}
    out, kv = layer(q, torch.stack((k, v), 2), **options)
    assert_close(out, turned_q)
    assert_close(kv, torch.stack((turned_k, v), 2))
    qkv = layer(torch.cat((q, k, v), 2), num_heads_q=4, **options)
    assert_close(qkv, torch.cat((turned_q, turned_k, v), 2))
    offsets = torch.tensor([3, 3])
    assert_close(layer(torch.stack((k, k, v), 2), seqlen_offset=offsets)[:, :, 1], turned_k)


def test_module_in_the_place_of_flash_attn() -> None:
    assert importlib.util.find_spec("flash_attn") is None, "these tests run without flash-attn"
    for _ in range(2):
        flash_attn.enable()
    from flash_attn import __version__, flash_attn_func
    from flash_attn.flash_attn_interface import _flash_attn_forward
    from flash_attn.layers.rotary import apply_rotary_emb as ours

    assert (flash_attn_func, ours) == (flash_attn.flash_attn_func, apply_rotary_emb)
    assert _flash_attn_forward is flash_attn._flash_attn_forward
    assert __version__.startswith("2.8.")
    flash_attn.disable()
    flash_attn.disable()
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
