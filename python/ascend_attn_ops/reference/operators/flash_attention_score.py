"""FlashAttentionScore and its gradient: docs/operators/flash_attention_score.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import compute_dtype

FLT_MAX = torch.finfo(torch.float32).max
LANES = 8  # how often each statistic is given
_INFINITE = 2**40
COMPRESSED_PSE_ROWS = 1024


def with_defaults(a: Arguments) -> Arguments:
    """With the number of query heads and the scale: 1 / sqrt(D), D with its rope."""
    layout = a.layout.partition("_")[0]
    if a.num_heads is None:
        heads_axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}[layout]
        a.num_heads = a.query.shape[heads_axis]
    a.num_heads = int(a.num_heads)  # torch takes a tensor and numpy's numbers as well
    if getattr(a, "num_key_value_heads", None) is not None:
        a.num_key_value_heads = int(a.num_key_value_heads)
    if a.scale_value is None:
        heads = a.num_heads if layout in ("BSH", "SBH") else 1
        rope = getattr(a, "query_rope", None)
        size = a.query.shape[-1] + (0 if rope is None else rope.shape[-1])
        a.scale_value = (size // heads) ** -0.5
    a.scale_value = float(a.scale_value)
    return a


class Span(NamedTuple):
    """One sequence: where its tokens are in (B,N,S,D) tensors, and what comes before it."""

    number: int
    batch: int
    queries: slice
    keys: slice
    pairs_before: int  # sum of queries * keys of the sequences before it
    room: tuple[int, int]  # its queries and keys with the padding behind them
    is_band: bool  # whether it has the band of sparse_mode 7 and 8

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


@reference
def flash_attention_score(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query over the keys that its mask keeps.

        s = (q @ k^T + pse) * scale_value, or q @ k^T * scale_value + pse for pse_type 0, 2 and 3
        max = s.max(-1);  sum = exp(s - max).sum(-1)           over the keys that are kept
        out = (exp(s - max) * keep / keep_prob) @ v / sum

    A sink is the score of one more key of every row, which has no value. A row that keeps no key
    gives 0, with the statistics -FLT_MAX and FLT_MAX, or those of the sink; 0, 0 and 0 when there
    is no key at all. Differentiable by plain autograd.

    Returns out and the statistics, (B,N,Sq,8) in all layouts but TND: there (T,N,8), which holds
    (N,Sq_b,8) of one sequence after another.
    """
    with_defaults(a)
    dtype = compute_dtype(a.query)
    q, k, v = by_head(a, dtype)
    group = a.num_heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    softmax_max, softmax_sum = (q.new_zeros(q[..., 0].numel()) for _ in range(2))

    begin = 0
    for sequence in sequences(q, k, a):
        sq, skv = sequence.lengths
        b, rows_q, rows_k = sequence.batch, sequence.queries, sequence.keys
        s = scores(q[b, :, rows_q], k[b, :, rows_k], sequence, a)
        keep = kept(sequence, a).to(q.device)
        s = s.masked_fill(~keep, -torch.inf)
        some = keep.any(-1, keepdim=True).expand(a.num_heads, sq, 1)
        if skv > 0:
            sink = sinks(a, dtype)
            some = some | (sink != -torch.inf)
            largest = torch.maximum(s.detach().amax(-1, keepdim=True), sink.detach())
            maximum = torch.where(some, largest, 0)
            e = torch.where(some, (s - maximum).exp(), 0)
            total = torch.where(some, e.sum(-1, keepdim=True) + (sink - maximum).exp(), 1)
            dropped = e * dropout(sequence, a, dtype)
            out[b, :, rows_q] = dropped / total @ v[b, :, rows_k]
            for statistic, x, without in (
                (softmax_max, maximum, -FLT_MAX), (softmax_sum, total, FLT_MAX),
            ):  # fmt: skip
                of_heads = statistic[begin : begin + a.num_heads * sequence.room[0]]
                of_heads.view(a.num_heads, -1)[:, :sq] = torch.where(some, x, without)[..., 0]
        begin += a.num_heads * sequence.room[0]

    shape = (q.shape[2], a.num_heads) if a.layout == "TND" else (len(q), a.num_heads, q.shape[2])
    softmax_max, softmax_sum = (
        x.view(*shape, 1).expand(*shape, LANES).contiguous() for x in (softmax_max, softmax_sum)
    )
    return from_heads(out, a.layout).to(a.query.dtype), softmax_max, softmax_sum


@reference
@torch.no_grad()
def flash_attention_score_grad(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash_attention_score`, from its output and statistics.

        P  = exp(s - max) / sum
        dv = (P * keep / keep_prob)^T @ dy;  dP = dy @ v^T * keep / keep_prob
        dS = P * (dP - (dy * attention_in).sum(-1) + sum * d_softmax_sum)
        dq = scale_value * dS @ k;  dk = scale_value * dS^T @ q

    Returns dq, dk, dv, each of the shape and dtype of what it belongs to.
    """
    dq, dk, dv, *_ = gradients(a)
    return dq, dk, dv


@reference
@torch.no_grad()
def _flash_attention_score_extended_grad(a: Arguments) -> tuple[Tensor, ...]:
    """The same, and the gradients of sink, query_rope and key_rope: (0,) for what is absent, as for
    pse_shift, whose gradient is that of `flash_attention_score` by autograd.

    dsink = -sum of exp(sink - max) / sum * (dy * attention_in).sum(-1)      over all rows of a head
    """
    return gradients(a)


def gradients(a: Arguments) -> tuple[Tensor, ...]:
    with_defaults(a)
    dtype = compute_dtype(a.query)
    q, k, v = by_head(a, dtype)
    dy = torch.zeros_like(a.attention_in) if a.dy is None else a.dy
    d_out, out = (to_heads(x, a.num_heads, a.layout).to(dtype) for x in (dy, a.attention_in))
    group = a.num_heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    d_sink = torch.zeros(a.num_heads, dtype=torch.float64, device=q.device)

    begin = 0
    for sequence in sequences(q, k, a):
        sq, skv = sequence.lengths
        b, rows_q, rows_k = sequence.batch, sequence.queries, sequence.keys
        rows = slice(begin, begin + a.num_heads * sequence.room[0])
        maximum, total, d_total = (
            torch.zeros(a.num_heads, sq, 1, dtype=dtype)
            if x is None
            else x.flatten(0, -2)[rows].view(a.num_heads, -1, LANES)[:, :sq].to(dtype)
            for x in (a.softmax_max, a.softmax_sum, a.d_softmax_sum)
        )
        maximum, total = maximum[..., :1], total[..., :1]
        s = scores(q[b, :, rows_q], k[b, :, rows_k], sequence, a)
        keep = kept(sequence, a).to(q.device)
        # No weight is above 1: a maximum that was rounded may be below its score.
        p = torch.where(keep, (s - maximum).clamp(max=0).exp() / total, 0)
        drop = dropout(sequence, a, dtype)
        d_p = d_out[b, :, rows_q] @ v[b, :, rows_k].mT * drop
        delta = (d_out[b, :, rows_q] * out[b, :, rows_q]).sum(-1, keepdim=True)
        delta -= total * d_total.sum(-1, keepdim=True)
        d_s = p * (d_p - delta)
        d_q[b, :, rows_q] = a.scale_value * (d_s @ k[b, :, rows_k])
        d_k[b, :, rows_k] = a.scale_value * (d_s.mT @ q[b, :, rows_q])
        d_v[b, :, rows_k] = (p * drop).mT @ d_out[b, :, rows_q]
        if skv > 0:
            of_sink = (sinks(a, dtype) - maximum).clamp(max=0).exp() / total
            d_sink -= (of_sink * delta).sum((1, 2), dtype=torch.float64)
        begin += a.num_heads * sequence.room[0]

    d_k, d_v = (x.unflatten(1, (-1, group)).sum(2) for x in (d_k, d_v))
    size = to_heads(a.query, a.num_heads, a.layout).shape[-1]
    of_query, of_key = (
        [from_heads(part, a.layout).to(a.query.dtype) for part in (x[..., :size], x[..., size:])]
        for x in (d_q, d_k)
    )
    of_value = from_heads(d_v, a.layout).to(a.value.dtype)
    absent = a.query.new_zeros(0)
    sink, rope = (getattr(a, name, None) for name in ("sink", "query_rope"))
    return (
        of_query[0],
        of_key[0],
        of_value,
        absent if sink is None else d_sink.to(a.softmax_sum.dtype),
        *((absent, absent) if rope is None else (of_query[1], of_key[1])),
        absent,
    )


def sinks(a: Arguments, dtype: torch.dtype) -> Tensor:
    """(N, 1, 1); minus infinity is none."""
    sink: Tensor | None = getattr(a, "sink", None)
    if sink is None:
        return a.query.new_full((a.num_heads, 1, 1), -torch.inf, dtype=dtype)
    return sink.to(dtype)[:, None, None]


def by_head(a: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; the ropes are a part of the heads."""
    q = to_heads(a.query, a.num_heads, a.layout)
    key_heads = a.key.shape[2] // q.shape[-1] if a.layout in ("BSH", "SBH") else None
    k, v = (to_heads(x, key_heads, a.layout) for x in (a.key, a.value))
    if (query_rope := getattr(a, "query_rope", None)) is not None:
        q = torch.cat((q, to_heads(query_rope, a.num_heads, a.layout)), -1)
        k = torch.cat((k, to_heads(a.key_rope, key_heads, a.layout)), -1)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def to_heads(x: Tensor, heads: int | None, layout: str) -> Tensor:
    """Any layout to (B,N,S,D); TND and NTD to (1,N,T,D). torch takes a bool for a number."""
    match layout:
        case "BSH":
            return x.unflatten(2, (int(heads or 0), -1)).transpose(1, 2)
        case "SBH":
            return x.unflatten(2, (int(heads or 0), -1)).permute(1, 2, 0, 3)
        case "BSND":
            return x.transpose(1, 2)
        case "TND":
            return x.transpose(0, 1)[None]
        case "NTD":
            return x[None]
    return x


def from_heads(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "BSH":
            x = x.transpose(1, 2).flatten(2)
        case "SBH":
            x = x.permute(2, 0, 1, 3).flatten(2)
        case "BSND":
            x = x.transpose(1, 2)
        case "NBSD":
            x = x.transpose(0, 1)
        case "TND":
            x = x[0].transpose(0, 1)
        case "NTD":
            x = x[0]
    return x.contiguous()


def sequences(q: Tensor, k: Tensor, a: Arguments) -> Iterator[Span]:
    """Yields the sequences; in TND, where there may be thousands, only those with queries."""
    if a.layout != "TND":
        room = q.shape[2], k.shape[2]
        given = a.actual_seq_lengths_query, a.actual_seq_lengths_key
        for b in range(q.shape[0]):
            sq, skv = (x[b] if x else most for x, most in zip(given, room, strict=True))
            yield Span(b, b, slice(0, sq), slice(0, skv), b * room[0] * room[1], room, False)
        return
    spans = [[slice(*span) for span in pairwise([0, *x])] for x in prefix_sums(a)]
    both = list(zip(*spans, strict=True))
    filled = [i for i, (x, y) in enumerate(both) if x.stop > x.start and y.stop > y.start]
    band = filled[0 if a.sparse_mode == 8 else -1] if filled else -1
    pairs = 0
    for i, (queries, keys) in enumerate(both):
        if queries.stop > queries.start:
            room = queries.stop - queries.start, keys.stop - keys.start
            yield Span(i, 0, queries, keys, pairs, room, i == band)
        pairs += (queries.stop - queries.start) * (keys.stop - keys.start)


def prefix_sums(a: Arguments) -> list[list[int]]:
    """The lengths of queries and keys; a 0 that closes a list repeats the last sum."""
    return [
        list(accumulate(x or [], max))
        for x in (a.actual_seq_lengths_query, a.actual_seq_lengths_key)
    ]


def scores(q: Tensor, k: Tensor, sequence: Span, a: Arguments) -> Tensor:
    s, pse = q @ k.mT, pse_of(sequence, a)
    return (s + pse) * a.scale_value if a.pse_type == 1 else s * a.scale_value + pse


def kept(sequence: Span, a: Arguments) -> Tensor:
    """(1|N, Sq, Skv), True where a key is kept.

    Modes 5 and 6 are mode 3 with a prefix. Modes 7 and 8 are modes 3 and 2, but 4 in one sequence.
    """
    sq, skv = sequence.lengths
    mode = {5: 3, 6: 3, 7: 3, 8: 2}.get(a.sparse_mode, a.sparse_mode)
    if a.sparse_mode >= 7 and sequence.is_band:
        mode = 4
    of_mode = band(sq, skv, a, mode)
    if a.sparse_mode in (5, 6):
        of_mode = of_mode | (torch.arange(skv) < a.prefix[sequence.number])
    # A compressed mask says no more than the mode.
    if a.atten_mask is None or a.sparse_mode > 1:
        return of_mode[None]
    mask = a.atten_mask if a.atten_mask.dim() == 4 else a.atten_mask[None, None]
    mask = mask[sequence.number if mask.shape[0] > 1 else 0]
    if of_all_tokens(a):
        mask = mask[:, sequence.queries, sequence.keys]
    rows, columns = (
        size if length == 1 else length
        for length, size in zip(mask.shape[1:], (sq, skv), strict=True)
    )
    return of_mode & (mask.expand(-1, rows, columns)[:, :sq, :skv].cpu() == 0)


def band(sq: int, skv: int, a: Arguments, mode: int) -> Tensor:
    """(Sq, Skv), True where a sparse mode up to 4 keeps a key: the table of the modes."""
    if a.atten_mask is None and mode == 0:
        return torch.ones(sq, skv, dtype=torch.bool)
    # Sums with what bounds nothing would be more than int64 holds.
    pre, following = (min(max(x, -_INFINITE), _INFINITE) for x in (a.pre_tokens, a.next_tokens))
    pre, following = {
        0: (pre, following),
        1: (_INFINITE, _INFINITE),
        2: (_INFINITE, 0),
        3: (_INFINITE, skv - sq),
        4: (pre - skv + sq, following + skv - sq),
    }[mode]
    i, j = torch.arange(sq)[:, None], torch.arange(skv)
    return (i - pre <= j) & (j <= i + following)


def of_all_tokens(a: Arguments) -> bool:
    """Whether a mask in TND has the tokens of all sequences, instead of the longest one's."""
    if a.layout != "TND" or a.atten_mask is None or a.atten_mask.dim() != 2:
        return False
    longest = [max(y - x for x, y in pairwise([0, *ends])) for ends in prefix_sums(a)]
    return list(a.atten_mask.shape) != longest


def pse_of(sequence: Span, a: Arguments) -> Tensor | float:
    """The bias of the scores, (N, Sq, Skv) or what broadcasts to it."""
    pse, heads = a.pse_shift, a.num_heads
    if pse is None:
        return 0.0
    sq, skv = sequence.lengths
    if a.pse_type >= 2:
        q_start, kv_start = (x[0] if x else 0 for x in (a.q_start_idx, a.kv_start_idx))
        shift = kv_start - q_start if a.kv_start_idx else 0
        slope = (
            pse[sequence.number] if pse.dim() == 2 and pse.shape[0] > 1 else pse.view(-1, heads)[0]
        )
        # float64 inputs have scores, and so slopes, in float64.
        slope = slope.to(torch.promote_types(slope.dtype, a.query.dtype))
        distance = (torch.arange(skv) + shift - torch.arange(sq)[:, None]).abs().to(slope)
        return -slope[:, None, None] * (distance if a.pse_type == 2 else distance.sqrt())
    if a.layout == "TND" and pse.dim() == 1:
        spans = [[stop - start for start, stop in pairwise([0, *x])] for x in prefix_sums(a)]
        if pse.numel() == heads * sum(x * y for x, y in zip(*spans, strict=True)):
            begin = heads * sequence.pairs_before
            return pse[begin : begin + heads * sq * skv].view(heads, sq, skv)
        begin = heads * sequence.keys.start
        return pse[begin : begin + heads * skv].view(heads, 1, skv)
    if a.layout == "TND" and 0 in sequence.lengths:
        return 0.0
    pse = pse[sequence.number if pse.shape[0] > 1 else 0]
    compressed = COMPRESSED_PSE_ROWS
    if pse.shape[1] == compressed and sq == skv and sq > compressed:
        r, c = torch.arange(sq)[:, None], torch.arange(skv)
        m = torch.where(r >= sq - compressed, r - (sq - compressed), r % compressed)
        column = torch.where(r >= sq - compressed, c, sq - (r - c) - (compressed - m))
        return pse[:, m, column.clamp(max=skv - 1)]  # no key beyond the diagonal is kept
    return pse[:, :sq, :skv]


def dropout(sequence: Span, a: Arguments, dtype: torch.dtype) -> Tensor | float:
    """keep / keep_prob, (N, Sq, Skv): bit i of the mask, lowest first, is the i-th score."""
    if a.drop_mask is None:
        return 1.0
    sq, skv = sequence.lengths
    bits = (a.drop_mask.flatten()[:, None] >> torch.arange(8, device=a.drop_mask.device)) & 1
    begin = a.num_heads * sequence.pairs_before
    queries, keys = sequence.room
    bits = bits.flatten()[begin : begin + a.num_heads * queries * keys]
    return bits.view(a.num_heads, queries, keys)[:, :sq, :skv].to(dtype) / a.keep_prob
