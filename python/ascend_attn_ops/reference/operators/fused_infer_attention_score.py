"""FusedInferAttentionScore: docs/operators/fused_infer_attention_score.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import compute_dtype
from .flash_attention_score import band, from_heads, to_heads, with_defaults
from .prompt_flash_attention import actual_length, kept


class Span(NamedTuple):
    batch: int
    queries: slice  # of (B, N, Sq, D), in packed layouts of (1, N, T, D)
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


@reference
def fused_infer_attention_score(a: Arguments) -> tuple[Tensor, Tensor]:
    """Attention of every query over the keys that its mask keeps, by sequence and head.

        s = (q @ k^T + q_rope @ k_rope^T) * scale_value
        lse = log(sum(exp(s)) + exp(sink));  out = exp(s - lse) @ v

    A row without keys is zero, with lse -inf or the sink; rows of no sequence are zero and -inf.
    With scales, k and v are the int8 numbers times those of their channels or tokens.
    """
    inputs, output = layouts(a.layout)
    with_defaults(a)
    q = scaled_queries(a, inputs)
    size = size_of_value(a, a.num_key_value_heads or a.num_heads)
    out = torch.zeros(*q.shape[:3], size, dtype=q.dtype)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    for at, weights, v, total in by_sequence(a, inputs, q):
        out[at], lse[at] = weights @ v, total

    lse = lse if a.return_softmax_lse else lse.new_empty(0)
    if a.return_softmax_lse:
        lse = lse[0].T if is_packed(inputs) else lse
        lse = lse[..., None].contiguous()
    return from_heads(out, output).to(dtype_of(a)), lse


def dtype_of(a: Arguments) -> torch.dtype:
    """That of the output: an int8 query has the dtype of its rope."""
    x: Tensor = a.query if a.dequant_scale_query is None else a.query_rope
    return x.dtype


def scaled_queries(a: Arguments, inputs: str) -> Tensor:
    """(B,N,Sq,D), with its rope; an int8 one times its scales and that of the keys."""
    q = to_heads(a.query, a.num_heads, inputs)
    if a.query_rope is not None:
        q = torch.cat((q, to_heads(a.query_rope, a.num_heads, inputs)), -1)
    q = q.to(compute_dtype(q))
    if a.dequant_scale_query is None:
        return q
    scale = a.dequant_scale_query if inputs == "BSH" else a.dequant_scale_query[..., None]
    return q * to_heads(scale, a.num_heads, inputs) * a.key_antiquant_scale


def by_sequence(
    a: Arguments, inputs: str, q: Tensor
) -> Iterator[tuple[tuple[Any, ...], Tensor, Tensor, Tensor]]:
    """Yields where each sequence is in (B,N,Sq), its weights (N,Sq,Skv), values and lse."""
    key_heads = a.num_key_value_heads or a.num_heads
    sink = q.new_full((a.num_heads,), -torch.inf) if a.sink is None else a.sink
    sink = sink.to(q.dtype)[:, None, None]
    for number, span in enumerate(spans(a, inputs, q)):
        sq, skv = span.lengths
        if sq == 0:
            continue
        at = (0 if is_packed(inputs) else span.batch, slice(None), span.queries)
        k, v = (
            x.to(q.dtype).repeat_interleave(a.num_heads // key_heads, 0)
            for x in keys_and_values(
                a, inputs, key_heads, number, span, band(sq, skv, a, a.sparse_mode).any(0)
            )
        )
        keep = kept(number, sq, skv, a, single_query=q.shape[2] == 1)
        s = q[at] @ k.mT * a.scale_value
        s = s.masked_fill(~keep, -torch.inf)
        total = torch.cat((s, sink.expand(a.num_heads, sq, 1)), -1).logsumexp(-1)
        # A kept key may have a score of -inf, and so may all.
        yield at, torch.where(s != -torch.inf, (s - total[..., None]).exp(), 0), v, total


def layouts(name: str) -> tuple[str, str]:
    inputs, _, output = name.partition("_")
    return inputs, output or inputs


def is_packed(layout: str) -> bool:
    return "T" in layout


def size_of_value(a: Arguments, key_heads: int) -> int:
    if a.block_table is not None:
        x = a.value
        fractals = x.shape[2] * x.shape[-1]
        return int({3: x.shape[-1] // key_heads, 4: x.shape[-1]}.get(x.dim(), fractals))
    return int(to_heads(a.value, key_heads, layouts(a.layout)[0]).shape[-1])


def spans(a: Arguments, layout: str, q: Tensor) -> list[Span]:
    """The tokens of every sequence. Paged keys are counted from 0."""
    queries, keys = a.actual_seq_lengths_query or (), a.actual_seq_lengths_key or ()
    if is_packed(layout):
        ends = [slice(*x) for x in pairwise([0, *queries])]
        if a.block_table is None:
            of_keys = [slice(*x) for x in pairwise([0, *keys])]
        else:
            of_keys = [slice(0, x) for x in keys]
        return [Span(b, *x) for b, x in enumerate(zip(ends, of_keys, strict=True))]
    room = 0
    if a.block_table is None:
        room = to_heads(a.key, a.num_key_value_heads or a.num_heads, layout).shape[2]
    return [
        Span(
            b,
            slice(0, actual_length(queries, b, q.shape[2])),
            slice(0, actual_length(keys, b, room)),
        )
        for b in range(q.shape[0])
    ]


def keys_and_values(
    a: Arguments, layout: str, heads: int, number: int, span: Span, read: Tensor
) -> tuple[Tensor, Tensor]:
    """(Nk,Skv,D) and (Nk,Skv,Dv) of one sequence; (Skv,) says which of its keys are read."""

    def of(x: Tensor) -> Tensor:
        if a.block_table is None:
            rows = to_heads(x, heads, layout)[0 if is_packed(layout) else span.batch]
            return rows[:, span.keys]
        return from_pages(pages_by_head(x, heads), a.block_table[number], read)

    k, v = of(a.key), of(a.value)
    if a.dequant_scale_query is not None:
        v = v * a.value_antiquant_scale
    elif a.key_antiquant_scale is not None:
        k, v = (
            x * by_head(scale, heads, a.key_antiquant_mode, number, len(read))
            for x, scale in ((k, a.key_antiquant_scale), (v, a.value_antiquant_scale))
        )
    return k if a.key_rope is None else torch.cat((k, of(a.key_rope)), -1), v


def by_head(scale: Tensor, heads: int, mode: int, number: int, keys: int) -> Tensor:
    """(Nk,1,D) or (Skv,1), with which the int8 numbers of a sequence are multiplied."""
    scale = scale.to(compute_dtype(scale))
    return scale.reshape(heads, 1, -1) if mode == 0 else scale[number, :keys, None]


def pages_by_head(pages: Tensor, heads: int) -> Tensor:
    """(num_blocks,N,block_size,D)."""
    if pages.dim() == 3:
        return pages.unflatten(2, (heads, -1)).transpose(1, 2)
    return pages.transpose(2, 3).flatten(3) if pages.dim() == 5 else pages


def from_pages(pages: Tensor, table: Tensor, read: Tensor) -> Tensor:
    """(N,Skv,D) of pages by head: key j is in row j % block_size of block table[j // block_size].

    Blocks of which no key is read are zeros: their numbers may be anything.
    """
    unread = pages.new_zeros(pages.shape[1:])
    blocks = zip(table, read.split(pages.shape[2]), strict=False)
    keys = [pages[number] if part.any() else unread for number, part in blocks]
    return torch.cat((unread[:, :0], *keys), 1)[:, : len(read)]
