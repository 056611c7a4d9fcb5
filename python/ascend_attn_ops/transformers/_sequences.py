"""Which tokens of a batch belong together: padding, packed sequences and caches as lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.device_limits import device_in_force
from ascend_attn_ops._core.packing import (
    Lengths,
    begins_of_runs,
    lengths_in,
    lengths_of,
    without_empty,
)
from ascend_attn_ops._core.torch_private import assert_async

_MASK = "enable_dsa", "attention_mask"


class Sequences(NamedTuple):
    """The sequences of a batch whose axes of batch and tokens are one, as in layout TND.

    Attributes:
        query_ends: cumulative numbers of queries, the end of each sequence.
        key_ends: of its keys, of which the queries are the last ones.
        valid: (T1,), False for padding, whose tokens have sequences of their own: nobody reads
            them, and what they read does not matter. None if all are valid.
    """

    query_ends: Lengths
    key_ends: Lengths
    valid: Tensor | None


def padded(valid: Tensor, queries: int, offset: int | Tensor) -> Sequences:
    """The sequences of a padded batch, or of one whose cache has unused room.

    `valid` is (B, keys), False for padding and for unused keys. The queries of a batch are the keys
    from `offset` on, as many were cached before.
    """
    batch, keys = valid.shape
    positions = torch.arange(keys, device=valid.device)
    # Three sequences per batch, some of them empty: padding, what is valid, padding and unused.
    first = valid.int().argmax(-1)
    behind = first + valid.sum(-1)
    ends = torch.stack([first, behind, torch.full_like(first, keys)], -1)
    rows = torch.arange(batch, device=valid.device)[:, None]
    key_ends = (ends + rows * keys).flatten().int()
    query_ends = ((ends - offset).clamp(0, queries) + rows * queries).flatten().int()
    query_positions = offset + torch.arange(queries, device=valid.device)
    valid_queries = valid.index_select(1, query_positions).flatten()
    if is_compiling():
        return Sequences(query_ends, key_ends, valid_queries)
    if not torch.equal(valid, (positions >= first[:, None]) & (positions < behind[:, None])):
        expected = "padding before and behind the tokens of a sequence only"
        raise wrong(ValueError, *_MASK, expected, "zeros between them")
    kept = without_empty(list(zip(query_ends.tolist(), key_ends.tolist(), strict=True)))
    return Sequences([q for q, _ in kept], [k for _, k in kept], valid_queries)


# How many sequences there are is in the data.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed(position_ids: Tensor, keys: int, offset: int) -> Sequences | None:
    """The sequences of position ids (B, S) that start over; None if each batch is one sequence.

    A sequence ends where an id is not the one before plus one, as in transformers.
    """
    batch, queries = position_ids.shape
    return from_begins(begins_of_runs(position_ids, 1), batch, queries, keys, offset)


def from_begins(
    begins: list[int], batch: int, queries: int, keys: int, offset: int
) -> Sequences | None:
    """The sequences that begin at these queries; None if each batch is one sequence.

    The first sequence of a batch goes on with `offset` cached keys. Keys behind those of the tokens
    are nobody's.
    """
    if len(begins) == batch:
        return None
    ends = []
    for end in [*begins[1:], batch * queries]:
        row, last = divmod(end - 1, queries)
        ends.append((end, row * keys + offset + last + 1))
        if last == queries - 1:
            ends.append((end, (row + 1) * keys))
    query_ends, key_ends = zip(*without_empty(ends), strict=True)
    return Sequences(query_ends, key_ends, None)


def of_collator(
    function: str, kwargs: Mapping[str, Any], queries: int, keys: int
) -> Sequences | None:
    """The sequences whose lengths a collator says, if it does, for compiled models too."""
    query_ends = kwargs.get("cu_seq_lens_q")
    key_ends = kwargs.get("cu_seq_lens_k", query_ends)
    if query_ends is None or key_ends is None:
        return None
    if keys != queries:
        hint = "a cache has keys of no sequence of the pack; pass use_cache=False"
        got = f"{keys} keys and {queries} tokens: {hint}"
        raise wrong(ValueError, function, "cu_seq_lens_q", "as many keys as tokens", got)
    return Sequences(query_ends[1:], key_ends[1:], None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def on_host(sequences: Sequences) -> Sequences:
    """With lists of ends."""
    query_ends, key_ends = (lengths_of(x) for x in sequences[:2])
    return Sequences(query_ends, key_ends, sequences.valid)


def ends_of(sequences: Tensor) -> Tensor:
    """The ends of sequences whose tokens have equal numbers (B, S), as int32 (1, 1, 1, count).

    How many sequences there are is not read: behind the last one stand empty ones, as many as there
    are tokens or a launch takes. They are on the host, so that an NPU waits once and not in each
    layer.
    """
    last = torch.nn.functional.pad(sequences.diff(dim=-1) != 0, (0, 1), value=True).flatten()
    tokens = last.shape[0]
    ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=last.device).where(last, tokens)
    ends = ends.sort().values[: _C.most_sequences].int().cpu()
    assert_async(ends[-1] == tokens, f"more than {_C.most_sequences} packed sequences")
    return ends.view(1, 1, 1, -1)


def every_key(sequences: Sequences | None, tokens: Tensor, keys: int) -> Tensor:
    """The selection of all keys, (B, S, 1, K), or (T, 1, K) of those of a token's own sequence."""
    # The device's loss takes multiples of 1024.
    count = keys if device_in_force() is None else keys + -keys % 1024
    selected = torch.arange(count, dtype=torch.int32, device=tokens.device)
    if sequences is None:
        selected = selected.masked_fill(selected >= keys, -1)
        return selected.expand(*tokens.shape[:2], 1, count).contiguous()
    queries, lengths = (lengths_in(x, tokens) for x in sequences[:2])
    lengths = lengths.repeat_interleave(queries, output_size=tokens.shape[:2].numel())[:, None]
    return selected.where(selected < lengths, -1).unsqueeze(1)


def valid_keys(mask: Tensor, queries: int, offset: int | Tensor) -> Tensor:
    """The keys (B, keys) that a mask (B, 1, queries, keys) lets anyone see; it has to be causal."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != queries:
        expected = f"shape (B, keys) or (B, 1, {queries}, keys)"
        raise wrong(ValueError, *_MASK, expected, f"{tuple(mask.shape)}")
    seen = mask.squeeze(1)
    if mask.dtype != torch.bool:
        # Added to the scores: zero keeps a key, the smallest number masks it out.
        seen = seen == 0
    valid = seen[:, -1]
    if is_compiling():
        if queries > 1:
            expected = "shape (B, keys) under torch.compile"
            got = "a mask of all pairs, which may not be causal"
            raise wrong(NotImplementedError, *_MASK, expected, got)
        return valid
    positions = torch.arange(mask.shape[-1], device=mask.device)
    causal = positions <= (offset + torch.arange(queries, device=mask.device))[:, None]
    if not torch.equal(seen, causal & valid[:, None]):
        got = "another pattern; position_ids that start over describe packed sequences"
        raise wrong(ValueError, *_MASK, "a causal mask with padding", got)
    return valid
