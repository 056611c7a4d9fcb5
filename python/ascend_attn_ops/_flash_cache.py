"""The caches of flash_attn_with_kvcache: where their rows are, what is written, what is read."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops import _flash_conventions as conventions
from ascend_attn_ops._arguments import readable, shown, wrong
from ascend_attn_ops._packing import counts, lengths_on
from ascend_attn_ops._pages import check_indices, gather_keys_and_values, slot_mapping
from ascend_attn_ops.operators.scatter_pa_kv_cache import scatter_pa_kv_cache_


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor | None,
    k: Tensor,
    v: Tensor,
    begin: int | Tensor,
) -> None:
    """Write k and v in place, from position `begin` of each sequence on.

    Args:
        table: (batch_size, blocks of a sequence); None where block b is all of sequence b.
    """
    batch, new = k.shape[:2]
    device = k.device
    positions = torch.arange(new, dtype=torch.int32, device=device).expand(batch, new)
    if isinstance(begin, Tensor):
        # A plain copy of a tensor on the CPU would wait for the device.
        on_device = begin if begin.device == device else lengths_on(begin.tolist(), k)
        assert on_device is not None
        begin = on_device[:, None]
    positions = positions + begin
    size = k_cache.shape[1]
    if table is None:
        slots = positions + torch.arange(0, batch * size, size, device=device)[:, None]
    else:
        slots = slot_mapping(table, positions, size)
    scatter_pa_kv_cache_(k.flatten(0, 1), k_cache, slots.flatten(), v.flatten(0, 1), v_cache)


def attend(
    options: conventions.Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    lengths: list[int],
) -> tuple[Tensor, Tensor | None]:
    """out (batch_size, seqlen_q, nheads, headdim) and lse (batch_size, nheads, seqlen_q).

    Args:
        k, v: the caches, (blocks, slots of a block, nheads_k, headdim).
        table: as of `append`; without it the caches are read where they lie.
        lengths: what is valid of each sequence, the new keys included.
    """
    batch = len(lengths)
    if table is not None:
        k, v = gather_keys_and_values(options.function, k, v, table, lengths)
    if k.size(0) != batch:
        k, v = k[:batch], v[:batch]
    longest = max(lengths) if lengths else 0
    if lengths.count(longest) != batch:
        return conventions.attend_in_rows(options, q, k, v, lengths)
    if longest != k.size(1):
        k, v = k[:, :longest], v[:, :longest]
    return conventions.attend(options, q, k, v)


def table_of(
    function: str,
    batch: int,
    rows: int,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> Tensor:
    """The blocks of each sequence: without block_table, one row of the cache."""
    if cache_batch_idx is None:
        assert block_table is not None
        check_indices(function, "block_table", block_table, 2)
        return block_table
    if block_table is not None:
        expected = "None beside block_table"
        raise wrong(ValueError, function, "cache_batch_idx", expected, "a tensor")
    check_indices(function, "cache_batch_idx", cache_batch_idx, 1)
    if list(cache_batch_idx.shape) != [batch]:
        expected = f"shape ({batch},), one row of the cache for each sequence"
        got = str(list(cache_batch_idx.shape))
        raise wrong(ValueError, function, "cache_batch_idx", expected, got)
    beyond = (cache_batch_idx < 0) | (cache_batch_idx >= rows)
    if readable(beyond) and bool(beyond.any()):
        got = shown(cache_batch_idx.tolist())
        raise wrong(ValueError, function, "cache_batch_idx", f"0..{rows - 1}", got)
    return cache_batch_idx[:, None]


def check_new(function: str, batch: int, k: Tensor, v: Tensor) -> None:
    """Checks what the flat rows of an append no longer show."""
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != (batch, k.shape[1]):
            expected = f"shape ({batch}, {k.shape[1]}, nheads_k, headdim), as q and k have it"
            raise wrong(ValueError, function, name, expected, str(list(x.shape)))


def lengths_with_new(
    function: str, batch: int, slots: int, new: int, cache_seqlens: int | Tensor | None
) -> list[int]:
    """How many keys each sequence holds with its new ones."""
    if cache_seqlens is None:
        if new:
            raise wrong(ValueError, function, "cache_seqlens", "where k and v are written", "None")
        return [slots] * batch
    if isinstance(cache_seqlens, Tensor):
        lengths = counts(function, "cache_seqlens", cache_seqlens, batch)
    elif isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        lengths = [cache_seqlens] * batch
    else:
        got = type(cache_seqlens).__name__
        raise wrong(TypeError, function, "cache_seqlens", "an int or a tensor", got)
    for length in lengths:
        if not 0 <= length <= slots - new:
            allowed = f"0..{slots - new}, as a sequence has {slots} slots, {new} of them for k"
            raise wrong(ValueError, function, "cache_seqlens", allowed, str(length))
    return [length + new for length in lengths]
