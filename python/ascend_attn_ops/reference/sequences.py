"""Shared by the sparse operators: tokens, their sequences, and the keys that a query may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .declaration import Arguments

Lengths = Sequence[int] | None


class Row(NamedTuple):
    """One query token that belongs to a sequence."""

    token: int  # its index among all query tokens
    first_key: int  # the index of its sequence's first key among all key tokens
    limit: int  # it sees the first `limit` keys of its sequence
    keys: int  # Lk
    capacity: int  # the keys that it has room for: S2 in BSND, Lk in TND


def rows(a: Arguments) -> Iterator[Row]:
    """Every query token that belongs to a sequence; tokens after the last sequence do not.

    BSND: lengths are counts, all of S when absent. TND: cumulative lengths.
    The query at position i of its sequence sees

        limit = Lk                         sparse_mode 0
        limit = max(Lk - Lq + i + 1, 0)    sparse_mode 3, aligned to the lower right corner

    Where a key stands for r = cmp_ratio tokens, the keys of a sequence stand for r * Lk + residual
    of them, and `causal_limit` is the limit.
    """
    query_spans = spans(a.query, a.layout, a.actual_seq_lengths_query)
    key_spans = spans(a.key, a.layout, a.actual_seq_lengths_key)
    ratio = getattr(a, "cmp_ratio", 1)
    lengths = [(lq, lk) for (_, lq), (_, lk) in zip(query_spans, key_spans, strict=True)]
    residuals = _residuals(a, ratio, lengths)
    for (first_query, lq), (first_key, lk), residual in zip(
        query_spans, key_spans, residuals, strict=True
    ):
        capacity = a.key.shape[1] if a.layout == "BSND" else lk
        for i in range(lq):
            causal = causal_limit(ratio * lk + residual, lq, i, ratio)
            limit = lk if a.sparse_mode == 0 else causal
            yield Row(first_query + i, first_key, limit, lk, capacity)


def causal_limit(tokens: int, queries: int, i: int, ratio: int) -> int:
    """How many keys query i of a sequence sees, whose keys stand for `ratio` tokens each, and for
    `tokens` with those behind the last key."""
    return max((tokens - queries + i + 1) // ratio, 0)


def spans(x: Tensor, layout: str, lengths: Lengths) -> list[tuple[int, int]]:
    """(first token, number of tokens) of every sequence."""
    # An array or a tensor has no truth value.
    given = [] if lengths is None else [int(x) for x in lengths]
    if layout == "TND":
        return [(begin, end - begin) for begin, end in pairwise([0, *given])]
    b, s = x.shape[:2]
    return [(i * s, length) for i, length in enumerate(given or [s] * b)]


def _residuals(a: Arguments, ratio: int, lengths: list[tuple[int, int]]) -> list[int]:
    """The tokens of each sequence that no key stands for yet. Without cmp_residual_key, the keys
    are those of the queries."""
    given = getattr(a, "cmp_residual_key", None)
    if given is None:
        if ratio == 1 or a.sparse_mode == 0:
            return [0] * len(lengths)
        residuals = [lq - ratio * lk for lq, lk in lengths]
    else:
        residuals = given.tolist()
    for residual in residuals:
        if not 0 <= residual < ratio:
            raise ValueError(f"cmp_residual_key: expected values in [0, {ratio}), got {residual}")
    return residuals


def leading_indices(
    indices: list[int], row: Row, selectable: int, sparse_block_size: int = 1
) -> list[int]:
    """The slots that a row reads: min(K, ceil(limit / sparse_block_size)).

    Checks of all slots that they name the first `selectable` keys, or none.
    """
    blocks = -(-selectable // sparse_block_size)
    for index in indices:
        if not -1 <= index < blocks:
            raise ValueError(
                f"sparse_indices: expected values in [-1, {blocks}) for query token {row.token}, "
                f"got {index}"
            )
    return indices[: -(-row.limit // sparse_block_size)]


def until_padding(indices: list[int]) -> list[int]:
    """The indices before the first -1."""
    return indices[: indices.index(-1)] if -1 in indices else indices


def with_dense_keys(a: Arguments, *caches: str) -> Arguments:
    """The same call with its keys side by side, if they are in the blocks of a cache: token j of
    sequence b is row j % block_size of block block_table[b, j // block_size].

    Their lengths are counts in both layouts.
    """
    if a.block_table is None:
        return a
    lengths = list(a.actual_seq_lengths_key)
    block_size, room = a.key.shape[1], a.block_table.shape[1] * a.key.shape[1]
    slots = []
    for b, length in enumerate(lengths):
        j = torch.arange(length)
        blocks = a.block_table.cpu()[b, j // block_size].long()
        if not ((blocks >= 0) & (blocks < a.key.shape[0])).all():
            raise ValueError(f"block_table: sequence {b} has a block that the cache does not have")
        slots.append(blocks * block_size + j % block_size)
    dense = Arguments(**vars(a))
    for name in caches:
        cache = getattr(a, name)
        if cache is None:
            continue
        keys = [cache.flatten(0, 1)[of_sequence] for of_sequence in slots]
        if a.layout == "BSND":
            padded = cache.new_zeros(len(keys), room, *cache.shape[2:])
            for of_sequence, to in zip(keys, padded, strict=True):
                to[: len(of_sequence)] = of_sequence
            setattr(dense, name, padded)
        else:
            setattr(dense, name, torch.cat(keys) if keys else cache.new_empty(0, *cache.shape[2:]))
    if a.layout == "TND":
        dense.actual_seq_lengths_key = list(accumulate(lengths))
    return dense


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_tokens(x: Tensor, layout: str, dtype: torch.dtype | None = None) -> Tensor:
    """(B,S,...) or (T,...) to (tokens,...)."""
    return (x.flatten(0, 1) if layout == "BSND" else x).to(dtype or x.dtype)


def like(gradient: Tensor, x: Tensor) -> Tensor:
    """In the shape and dtype of what it is the gradient of."""
    return gradient.reshape(x.shape).to(x.dtype)


def statistics_to_tokens(x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """(B,1,S1,G) or (1,T1,G) to (tokens,G)."""
    return to_tokens(x.squeeze(-3), layout, dtype)


def statistics_from_tokens(x: Tensor, query: Tensor) -> Tensor:
    """(tokens,G) to (B,1,S1,G) or (1,T1,G)."""
    return x.view(query.shape[:-1]).unsqueeze(-3)


def selection_to_tokens(x: Tensor, layout: str, dtype: torch.dtype | None = None) -> Tensor:
    """(B,S1,1,K), (T1,1,K) or either without its axis of heads to (tokens,K)."""
    return to_tokens(x, layout, dtype).flatten(1)


def index_lists(sparse_indices: Tensor, layout: str) -> list[list[int]]:
    """One list of K indices per token."""
    return selection_to_tokens(sparse_indices, layout).tolist()
