"""FlashAttentionScore and its gradient: spec/flash_attention.md.

Seed of the gradient: 002_e7d31711fa8f234d.txt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .sequences import compute_dtype

INT32_MAX = 2**31 - 1
FLT_MAX = torch.finfo(torch.float32).max


class Span(NamedTuple):
    """One sequence: where its tokens are in (B,N,S,D) tensors, and what comes before it."""

    number: int
    batch: int
    queries: slice
    keys: slice
    pairs_before: int  # sum of queries * keys of the sequences before it
    is_band: bool  # in sparse_mode 7 and 8

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


def flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    layout: str,
    pse_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = INT32_MAX,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query over the keys that its mask keeps.

        s = (q @ k^T + pse) * scale_value, or q @ k^T * scale_value + pse for pse_type 0, 2 and 3
        max = s.max(-1);  sum = exp(s - max).sum(-1)           over the keys that are kept
        out = (exp(s - max) * keep / keep_prob) @ v / sum

    A row that keeps no key gives 0, with the statistics -FLT_MAX and FLT_MAX; 0, 0 and 0 when there
    is no key at all. Differentiable by plain autograd.

    Returns out and the statistics, (B,N,Sq,8) in all layouts but TND: there (T,N,8), which holds
    (N,Sq_b,8) of one sequence after another.
    """
    dtype = compute_dtype(query)
    q, k, v = by_head(query, key, value, num_heads, layout, dtype)
    group = num_heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    softmax_max, softmax_sum = (q.new_zeros(q[..., 0].numel()) for _ in range(2))

    begin = 0
    options = (actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode)
    for sequence in sequences(q, k, layout, *options):
        sq, skv = sequence.lengths
        b, rows_q, rows_k = sequence.batch, sequence.queries, sequence.keys
        pse = pse_of(sequence, pse_shift, pse_type, num_heads, (q_start_idx, kv_start_idx), layout,
                     options[:2])  # fmt: skip
        s = q[b, :, rows_q] @ k[b, :, rows_k].mT
        s = (s + pse) * scale_value if pse_type == 1 else s * scale_value + pse
        keep = kept(sequence, atten_mask, sparse_mode, pre_tokens, next_tokens, prefix).to(q.device)
        s = s.masked_fill(~keep, -torch.inf)
        some = keep.any(-1, keepdim=True).expand(num_heads, sq, 1)
        if skv > 0:
            maximum = torch.where(some, s.detach().amax(-1, keepdim=True), 0)
            e = torch.where(some, (s - maximum).exp(), 0)
            total = torch.where(some, e.sum(-1, keepdim=True), 1)
            dropped = e * dropout(sequence, drop_mask, keep_prob, num_heads, dtype)
            out[b, :, rows_q] = dropped / total @ v[b, :, rows_k]
            rows = slice(begin, begin + num_heads * sq)
            softmax_max[rows] = torch.where(some, maximum, -FLT_MAX).flatten()
            softmax_sum[rows] = torch.where(some, total.detach(), FLT_MAX).flatten()
        begin += num_heads * sq

    shape = (q.shape[2], num_heads) if layout == "TND" else (q.shape[0], num_heads, q.shape[2])
    softmax_max, softmax_sum = (
        x.view(*shape, 1).expand(*shape, 8).contiguous() for x in (softmax_max, softmax_sum)
    )
    return from_heads(out, layout).to(query.dtype), softmax_max, softmax_sum


@torch.no_grad()
def flash_attention_score_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    *,
    num_heads: int,
    layout: str,
    pse_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = INT32_MAX,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash_attention_score`, from its output and statistics.

        P  = exp(s - max) / sum
        dv = (P * keep / keep_prob)^T @ dy;  dP = dy @ v^T * keep / keep_prob
        dS = P * (dP - (dy * attention_in).sum(-1))
        dq = scale_value * dS @ k;  dk = scale_value * dS^T @ q

    Returns dq, dk, dv, each of the shape and dtype of what it belongs to.
    """
    dtype = compute_dtype(query)
    q, k, v = by_head(query, key, value, num_heads, layout, dtype)
    d_out, out = (to_heads(x, num_heads, layout).to(dtype) for x in (dy, attention_in))
    group = num_heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))

    begin = 0
    options = (actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode)
    for sequence in sequences(q, k, layout, *options):
        sq, _ = sequence.lengths
        b, rows_q, rows_k = sequence.batch, sequence.queries, sequence.keys
        rows = slice(begin, begin + num_heads * sq)
        maximum, total = (
            x.flatten(0, -2)[rows, 0].view(num_heads, sq, 1).to(dtype)
            for x in (softmax_max, softmax_sum)
        )
        pse = pse_of(sequence, pse_shift, pse_type, num_heads, (q_start_idx, kv_start_idx), layout,
                     options[:2])  # fmt: skip
        s = q[b, :, rows_q] @ k[b, :, rows_k].mT
        s = (s + pse) * scale_value if pse_type == 1 else s * scale_value + pse
        keep = kept(sequence, atten_mask, sparse_mode, pre_tokens, next_tokens, prefix).to(q.device)
        p = torch.where(keep, (s - maximum).exp() / total, 0)
        drop = dropout(sequence, drop_mask, keep_prob, num_heads, dtype)
        d_p = d_out[b, :, rows_q] @ v[b, :, rows_k].mT * drop
        delta = (d_out[b, :, rows_q] * out[b, :, rows_q]).sum(-1, keepdim=True)
        d_s = p * (d_p - delta)
        d_q[b, :, rows_q] = scale_value * (d_s @ k[b, :, rows_k])
        d_k[b, :, rows_k] = scale_value * (d_s.mT @ q[b, :, rows_q])
        d_v[b, :, rows_k] = (p * drop).mT @ d_out[b, :, rows_q]
        begin += num_heads * sq

    d_k, d_v = (x.unflatten(1, (-1, group)).sum(2) for x in (d_k, d_v))
    return (
        from_heads(d_q, layout).to(query.dtype),
        from_heads(d_k, layout).to(key.dtype),
        from_heads(d_v, layout).to(value.dtype),
    )


def by_head(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    q = to_heads(query, num_heads, layout)
    key_heads = key.shape[2] // q.shape[-1] if layout in ("BSH", "SBH") else None
    k, v = (to_heads(x, key_heads, layout) for x in (key, value))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def to_heads(x: Tensor, heads: int | None, layout: str) -> Tensor:
    """Any layout to (B,N,S,D); TND to (1,N,T,D)."""
    match layout:
        case "BSH":
            return x.unflatten(2, (heads, -1)).transpose(1, 2)
        case "SBH":
            return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
        case "BSND":
            return x.transpose(1, 2)
        case "TND":
            return x.transpose(0, 1)[None]
    return x


def from_heads(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "BSH":
            x = x.transpose(1, 2).flatten(2)
        case "SBH":
            x = x.permute(2, 0, 1, 3).flatten(2)
        case "BSND":
            x = x.transpose(1, 2)
        case "TND":
            x = x[0].transpose(0, 1)
    return x.contiguous()


def sequences(
    q: Tensor,
    k: Tensor,
    layout: str,
    query_ends: Sequence[int] | None,
    key_ends: Sequence[int] | None,
    sparse_mode: int,
) -> Iterator[Span]:
    if layout != "TND":
        sq, skv = q.shape[2], k.shape[2]
        for b in range(q.shape[0]):
            yield Span(b, b, slice(0, sq), slice(0, skv), b * sq * skv, False)
        return
    spans = [pairwise([0, *(ends or [])]) for ends in (query_ends, key_ends)]
    both = [(slice(*a), slice(*b)) for a, b in zip(*spans, strict=True)]
    filled = [i for i, (a, b) in enumerate(both) if a.stop > a.start and b.stop > b.start]
    band = filled[0 if sparse_mode == 8 else -1] if filled else -1
    pairs = 0
    for i, (queries, keys) in enumerate(both):
        yield Span(i, 0, queries, keys, pairs, i == band)
        pairs += (queries.stop - queries.start) * (keys.stop - keys.start)


def kept(
    sequence: Span,
    atten_mask: Tensor | None,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    prefix: Sequence[int] | None,
) -> Tensor:
    """(1|N, Sq, Skv), True where a key is kept: the table of section 4."""
    sq, skv = sequence.lengths
    i, j, d = torch.arange(sq)[:, None], torch.arange(skv), skv - sq
    if atten_mask is None:
        return torch.ones(1, sq, skv, dtype=torch.bool)
    left_up, right_down = j <= i, j <= i + d
    band = (i + d - pre_tokens <= j) & (j <= i + d + next_tokens)
    match sparse_mode:
        case 0 | 1:
            mask = atten_mask if atten_mask.dim() == 4 else atten_mask[None, None]
            mask = mask[sequence.number if mask.shape[0] > 1 else 0][:, :sq, :skv].cpu() != 0
            return ~mask & ((i - pre_tokens <= j) & (j <= i + next_tokens) | (sparse_mode == 1))
        case 2:
            rule = left_up
        case 3:
            rule = right_down
        case 4:
            rule = band
        case 5 | 6:
            assert prefix is not None
            rule = (j < prefix[sequence.number]) | right_down
        case 7:
            rule = band if sequence.is_band else right_down
        case 8:
            rule = band if sequence.is_band else left_up
    return rule[None]


def pse_of(
    sequence: Span,
    pse: Tensor | None,
    pse_type: int,
    heads: int,
    start: tuple[Sequence[int] | None, Sequence[int] | None],
    layout: str,
    ends: tuple[Sequence[int] | None, Sequence[int] | None],
) -> Tensor | float:
    """What is added to the scores, (N, Sq, Skv) or what broadcasts to it: section 3."""
    if pse is None:
        return 0.0
    sq, skv = sequence.lengths
    if pse_type >= 2:
        q_start, kv_start = (x[0] if x else 0 for x in start)
        shift = kv_start - q_start if start[1] else 0
        slope = (
            pse[sequence.number] if pse.dim() == 2 and pse.shape[0] > 1 else pse.view(-1, heads)[0]
        )
        distance = (torch.arange(skv) + shift - torch.arange(sq)[:, None]).abs().to(pse)
        return -slope[:, None, None] * (distance if pse_type == 2 else distance.sqrt())
    if layout == "TND":
        spans = [[b - a for a, b in pairwise([0, *(x or [])])] for x in ends]
        if pse.numel() == heads * sum(a * b for a, b in zip(*spans, strict=True)):
            begin = heads * sequence.pairs_before
            return pse[begin : begin + heads * sq * skv].view(heads, sq, skv)
        begin = heads * sequence.keys.start
        return pse[begin : begin + heads * skv].view(heads, 1, skv)
    pse = pse[sequence.number if pse.shape[0] > 1 else 0]
    if pse.shape[1] == 1024 and sq == skv and sq > 1024:
        r, c = torch.arange(sq)[:, None], torch.arange(skv)
        m = torch.where(r >= sq - 1024, r - (sq - 1024), r % 1024)
        column = torch.where(r >= sq - 1024, c, sq - (r - c) - (1024 - m))
        return pse[:, m, column.clamp(max=skv - 1)]  # beyond the diagonal nothing is read
    return pse


def dropout(
    sequence: Span,
    drop_mask: Tensor | None,
    keep_prob: float,
    heads: int,
    dtype: torch.dtype,
) -> Tensor | float:
    """keep / keep_prob, (N, Sq, Skv): bit i of the mask, lowest first, is the i-th score."""
    if drop_mask is None:
        return 1.0
    sq, skv = sequence.lengths
    bits = (drop_mask.flatten()[:, None] >> torch.arange(8, device=drop_mask.device)) & 1
    begin = heads * sequence.pairs_before
    bits = bits.flatten()[begin : begin + heads * sq * skv].view(heads, sq, skv)
    return bits.to(dtype) / keep_prob
