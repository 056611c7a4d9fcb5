"""Dense attention for inference with statistics, over flash_attention_score: lengths, pages, ropes.

Sequences that do not fill their axis are packed where they lie: what is behind the valid tokens is
a sequence of its own, without keys or without queries, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._flash_calls import dense_log_sum_exp, packed_log_sum_exp
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops._packing import closed, lengths_between, with_gaps
from ascend_attn_ops.npu_operators.layouts import (
    LAYOUTS,
    check_ropes,
    gathered,
    in_layout,
    tokens_first,
)
from ascend_attn_ops.npu_operators.translation import unsupported

_BAND = 4
_MASKED_BY_MODE = (2, 3, _BAND)


class Inputs(NamedTuple):
    """The arguments of an operator; lengths are counts, in a packed layout cumulative."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    num_heads: int
    num_key_value_heads: int
    scale_value: float
    atten_mask: Tensor | None
    actual_seq_lengths_query: Sequence[int] | None = None
    actual_seq_lengths_key: Sequence[int] | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None  # further channels of key
    block_table: Tensor | None = None
    block_size: int = 0
    sparse_mode: int = 0
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS
    return_softmax_lse: bool = False
    sink: Tensor | None = None


class Batch(NamedTuple):
    """(B, S, N, D), or with `query_ends` (T, N, D); keys are packed only with `key_ends`."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_lengths: list[int]
    key_lengths: list[int]
    query_ends: list[int] | None
    key_ends: list[int] | None


def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns out in the output's layout, and lse (B, N, Sq, 1) or (T, N, 1). Without keys lse is
    +inf, or the sink."""
    check_mode(inputs)
    if inputs.sink is not None:
        check_sink(inputs.name, inputs.sink)
    batch = _batch(inputs)
    if inputs.atten_mask is not None and inputs.sparse_mode not in _MASKED_BY_MODE:
        out, lse = _with_full_mask(inputs, batch, inputs.atten_mask)
    else:
        if inputs.sparse_mode == 1:
            raise ValueError(f"{inputs.name}: atten_mask: expected in sparse_mode 1, got None")
        out, lse = _packed(inputs, batch)
    return in_layout(out, LAYOUTS[inputs.layout].out), lse[..., None]


def check_mode(inputs: Inputs) -> None:
    if inputs.sparse_mode not in range(5):
        raise unsupported(inputs.name, "sparse_mode", "0 to 4", inputs.sparse_mode)


def check_sink(name: str, sink: Tensor) -> None:
    if sink.dtype not in (torch.float16, torch.bfloat16):
        raise unsupported(name, "learnable_sink", "float16 or bfloat16", sink)


def _batch(inputs: Inputs) -> Batch:
    name, layout, lengths = inputs.name, inputs.layout, inputs.actual_seq_lengths_query
    check_ropes(name, inputs.query_rope, inputs.key_rope)
    query = tokens_first(name, "query", inputs.query, layout, inputs.num_heads)
    if inputs.query_rope is not None:
        rope = tokens_first(name, "query_rope", inputs.query_rope, layout, inputs.num_heads)
        query = torch.cat((query, rope), -1)
    query_ends = _required(name, "query", lengths) if LAYOUTS[layout].packed else None
    if query_ends is None:
        query_lengths = _counts(name, "query", lengths, query)
    else:
        query_lengths = lengths_between(query_ends)
    key, value, key_lengths, key_ends = _keys(inputs, len(query_lengths))
    return Batch(query, key, value, query_lengths, key_lengths, query_ends, key_ends)


def _keys(inputs: Inputs, batch: int) -> tuple[Tensor, Tensor, list[int], list[int] | None]:
    name, layout, given = inputs.name, inputs.layout, inputs.actual_seq_lengths_key
    heads = inputs.num_key_value_heads or inputs.num_heads
    tensors = {"key": inputs.key, "value": inputs.value}
    if inputs.key_rope is not None:
        tensors["key_rope"] = inputs.key_rope
    table, key_ends = inputs.block_table, None
    if table is not None:
        lengths = _required(name, "key", given)
        lengths = lengths * batch if len(lengths) == 1 else lengths
        size = inputs.block_size
        key, value, *rope = (
            gathered(name, argument, x, heads, table, size, lengths)
            for argument, x in tensors.items()
        )
    else:
        key, value, *rope = (
            tokens_first(name, argument, x, layout, heads) for argument, x in tensors.items()
        )
        key_ends = _required(name, "key", given) if LAYOUTS[layout].packed else None
        lengths = (
            _counts(name, "key", given, key) if key_ends is None else lengths_between(key_ends)
        )
    if len(lengths) != batch:
        raise ValueError(f"{name}: lengths of the keys: expected {batch}, got {len(lengths)}")
    return torch.cat((key, *rope), -1) if rope else key, value, lengths, key_ends


def _required(name: str, of: str, lengths: Sequence[int] | None) -> list[int]:
    if not lengths:
        raise ValueError(
            f"{name}: lengths of the {of}: expected in a packed layout and beside block_table, "
            f"got {lengths}"
        )
    return list(lengths)


def _counts(name: str, of: str, lengths: Sequence[int] | None, tensor: Tensor) -> list[int]:
    """One for each batch: all tokens, one number for all of them, or the first numbers."""
    batch, tokens = tensor.shape[:2]
    counts = [tokens] * batch if not lengths else list(lengths)
    counts = counts * batch if len(counts) == 1 else counts[:batch]
    if len(counts) < batch or any(not 0 <= count <= tokens for count in counts):
        raise ValueError(
            f"{name}: lengths of the {of}: expected one or {batch} numbers in 0..{tokens}, "
            f"got {list(lengths or [])}"
        )
    return counts


def _packed(inputs: Inputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """out and lse by lengths and mode alone."""
    query, key, value, query_ends, key_ends = (*batch[:3], batch.query_ends, batch.key_ends)
    dense = query_ends is None
    if dense:
        query = query.flatten(0, 1)
    if key_ends is None:
        # A padded query has room for Sq tokens, a packed one for those that it has.
        rooms = [batch.query.shape[1]] * len(batch.query_lengths) if dense else batch.query_lengths
        queries = list(zip(batch.query_lengths, rooms, strict=True))
        query_ends, key_ends = with_gaps(queries, [(n, key.shape[1]) for n in batch.key_lengths])
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    assert query_ends is not None
    query_list, key_list = closed(query, key, query_ends, key_ends)
    band: dict[str, int] = {}
    if inputs.sparse_mode == _BAND:
        band = {"pre_tokens": inputs.pre_tokens, "next_tokens": inputs.next_tokens}
    out, maximum, total = torch.ops.ascend.flash_attention_score(
        query, key, value, num_heads=inputs.num_heads, layout="TND",
        atten_mask=_square(inputs.atten_mask),
        actual_seq_lengths_query=query_list, actual_seq_lengths_key=key_list,
        scale_value=inputs.scale_value, inner_precise=2, sparse_mode=inputs.sparse_mode,
        sink=inputs.sink, **band,
    )  # fmt: skip
    lse = packed_log_sum_exp(maximum, total, query_ends, inputs.sink)
    if not dense:
        return out, lse.transpose(0, 1).contiguous()
    sizes = batch.query.shape[:2]
    return out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1).contiguous()


def _square(mask: Tensor | None) -> Tensor | None:
    """The compressed mask of a mode without the axes of batch and head."""
    return mask[(0,) * (mask.dim() - 2)] if mask is not None and mask.dim() > 2 else mask


def _with_full_mask(inputs: Inputs, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse where a mask says which keys each query keeps."""
    name = inputs.name
    if batch.query_ends is not None:
        raise unsupported(name, "atten_mask", "None or sparse_mode 2 to 4 in a packed layout", mask)
    sizes, queries, keys = batch.query.shape[0], batch.query.shape[1], batch.key.shape[1]
    masked = _full_mask(name, mask, sizes, queries, keys).to(torch.bool)
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    if inputs.sparse_mode == 0:
        outside = (column < row - inputs.pre_tokens) | (column > row + inputs.next_tokens)
        masked = masked | outside.to(mask.device)
    for position, lengths in ((row, batch.query_lengths), (column, batch.key_lengths)):
        behind = position >= torch.tensor(lengths).view(-1, 1, 1, 1)
        masked = masked | behind.to(mask.device)
    out, maximum, total = torch.ops.ascend.flash_attention_score(
        batch.query, batch.key, batch.value, num_heads=inputs.num_heads, layout="BSND",
        atten_mask=masked.expand(sizes, 1, queries, keys), scale_value=inputs.scale_value,
        inner_precise=2, sparse_mode=1, sink=inputs.sink,
    )  # fmt: skip
    return out, dense_log_sum_exp(maximum, total, inputs.sink)


def _full_mask(name: str, mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """(B or 1, 1, Sq, Skv) of a mask that may be larger, or lack axes."""
    shape = list(mask.shape)
    full = mask
    if mask.dim() == 2:
        # (B, Skv) for one query of each sequence, or (Sq, Skv).
        full = mask[:, None] if queries == 1 and shape[0] == batch else mask[None]
    if full.dim() == 3:
        full = full[:, None]
    fits = full.dim() == 4 and full.shape[0] in (1, batch) and full.shape[1] == 1
    if not fits or full.shape[2] < queries or full.shape[3] < keys:
        raise ValueError(
            f"{name}: atten_mask: expected ({batch} or 1, 1, {queries}, {keys}), also without the "
            f"first axes or larger in the last two, got {shape}"
        )
    return full[..., :queries, :keys]
