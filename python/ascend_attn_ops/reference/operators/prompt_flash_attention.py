"""PromptFlashAttention: docs/operators/prompt_flash_attention.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import compute_dtype
from .flash_attention_score import band, from_heads, to_heads, with_defaults

HALF_MAX = 65504.0


@reference
def prompt_flash_attention(a: Arguments) -> Tensor:
    """Attention of every query over the keys that its mask keeps, per batch and head.

        s = (q @ k^T) * scale_value;  p = exp(s - s.max());  out = (p @ v) / p.sum()

    Rows after the valid length and rows that keep no key are zero, in int8 as well.
    """
    inner = "BNSD" if a.layout == "BNSD_BSND" else a.layout
    with_defaults(a)
    q = to_heads(a.query, a.num_heads, inner)
    k, v = (to_heads(x, a.num_key_value_heads or a.num_heads, inner) for x in (a.key, a.value))
    group = a.num_heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    is_int8 = a.query.dtype == torch.int8
    out = torch.zeros(q.shape, dtype=torch.float32 if is_int8 else compute_dtype(a.query))
    has_keys = torch.zeros(*q.shape[:3], 1, dtype=torch.bool)

    for b in range(q.shape[0]):
        sq = actual_length(a.actual_seq_lengths_query, b, q.shape[2])
        skv = actual_length(a.actual_seq_lengths_key, b, k.shape[2])
        keep = kept(b, sq, skv, a)
        if skv == 0:
            continue
        rows = [q[b, :, :sq], k[b, :, :skv], v[b, :, :skv]]
        if is_int8:
            scales = [read_scale(x) for x in (a.deq_scale1, a.quant_scale1, a.deq_scale2)]
            out[b, :, :sq] = attend_int8(rows, keep, a.scale_value, scales)
        else:
            out[b, :, :sq] = attend([x.to(out.dtype) for x in rows], keep, a.scale_value)
        has_keys[b, :, :sq] = keep.any(-1, keepdim=True)

    out = out.masked_fill(~has_keys, 0)
    dtype = torch.float16 if is_int8 else a.query.dtype
    if a.quant_scale2 is not None:
        out = quantized(out, a.quant_scale2, a.quant_offset2).masked_fill(~has_keys, 0)
        dtype = torch.int8
    return from_heads(out, "BSND" if a.layout == "BNSD_BSND" else a.layout).to(dtype)


def attend(rows: list[Tensor], keep: Tensor, scale: float) -> Tensor:
    q, k, v = rows
    s = (q @ k.mT) * scale
    s = s.masked_fill(~keep, -torch.inf)
    p = (s - s.amax(-1, keepdim=True)).exp()
    return (p @ v) / p.sum(-1, keepdim=True)


def attend_int8(rows: list[Tensor], keep: Tensor, scale: float, scales: list[float]) -> Tensor:
    """In the order of the specification. s is float16; p, its sum and the output are float32."""
    (q, k, v), (deq_scale1, quant_scale1, deq_scale2) = rows, scales
    acc1 = q.long() @ k.long().mT
    s = (acc1.float() * deq_scale1).clamp(-HALF_MAX, HALF_MAX).half()
    s = s * torch.tensor(scale).half()
    s = s.float().masked_fill(~keep, -HALF_MAX)
    p = (s - s.amax(-1, keepdim=True)).exp()
    p8 = saturated(p * quant_scale1)
    acc2 = p8.long() @ v.long()
    return acc2.float() * deq_scale2 / p.sum(-1, keepdim=True)


def quantized(out: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """(B,N,S,D) to int8, per tensor or with one scale for each of the N * D channels."""
    n, d = out.shape[1], out.shape[3]

    def of_channels(x: Tensor) -> Tensor:
        return x.float().flatten().expand(n * d).view(n, 1, d)

    y = out.half().float() * of_channels(scale)
    return saturated(y if offset is None else y + of_channels(offset)).to(torch.int8)


def saturated(x: Tensor) -> Tensor:
    """Rounded half to even, and clamped to int8."""
    return x.round().clamp(-128, 127)


def read_scale(scale: Tensor | None) -> float:
    """float32, or uint64: the top 19 bits of the float32 in its low half."""
    assert scale is not None
    if scale.dtype == torch.uint64:
        bits = int(scale.item()) & 0xFFFFE000
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return float(scale.item())


def actual_length(lengths: Sequence[int] | None, batch: int, tokens: int) -> int:
    if not lengths:
        return tokens
    return lengths[0] if len(lengths) == 1 else lengths[batch]


def kept(batch: int, sq: int, skv: int, a: Arguments, *, single_query: bool = False) -> Tensor:
    """(Sq,Skv), True where a key is kept.

    single_query: a mask of two axes has one row for each batch.
    """
    of_mode = band(sq, skv, a, a.sparse_mode)
    # A compressed mask says no more than the band.
    if a.atten_mask is None or a.sparse_mode > 1:
        return of_mode
    mask = a.atten_mask
    if mask.dim() == 2:
        mask = mask[:, None] if single_query else mask[None]
    mask = mask.flatten(0, -3)
    return of_mode & (mask[batch if mask.shape[0] > 1 else 0, :sq, :skv] == 0)
