"""ScatterPaKvCache: docs/operators/scatter_pa_kv_cache.md."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declaration import Arguments, reference


@reference
def scatter_pa_kv_cache_(a: Arguments) -> None:
    """The scenario that the modes select; for keys of rank 4 a scatter_mode of "None" leaves it
    to compress_seq_offset."""
    scatter_mode = a.scatter_mode
    if a.key.dim() == 4 and scatter_mode == "None":
        scatter_mode = "Alibi" if a.compress_seq_offset is None else "Rope"
    pairs = [(a.key, a.key_cache), (a.value, a.value_cache)]
    for (source, cache), stride, offset in zip(pairs, a.strides, a.offsets, strict=True):
        if source is None or cache is None:
            continue
        if a.key.dim() == 3 and a.cache_mode == "PA_NZ":
            _scatter_nz(source, cache, a.slot_mapping)
        elif scatter_mode == "None":
            _scatter(source, cache, a.slot_mapping)
        elif scatter_mode == "Nct":
            _scatter(_rows_of_buffer(source, stride, offset), cache, a.slot_mapping)
        else:
            _scatter_runs(source, cache, scatter_mode, a)


def _scatter(source: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = cache.shape[1]
    for row, slot in zip(source, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = row


def _scatter_nz(source: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Element c of a row goes to [block, c // L, position, c % L], or in 5 axes element d of head h
    to [block, h, d // L, position, d % L]."""
    block_size = cache.shape[-2]
    for row, slot in zip(source, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            target = cache[slot // block_size, ..., slot % block_size, :]
            target.copy_(row.reshape(target.shape))


def _rows_of_buffer(source: Tensor, stride: int, offset: int) -> Tensor:
    tokens, heads, size = source.shape
    return source.as_strided(
        (tokens, heads, size), (stride, size, 1), source.storage_offset() + offset
    )


def _scatter_runs(source: Tensor, cache: Tensor, scatter_mode: str, a: Arguments) -> None:
    """Each head of each sequence to consecutive slots."""
    slots, lens = a.slot_mapping.flatten().tolist(), a.compress_lens.flatten().tolist()
    starts = a.compress_seq_offset.tolist() if a.compress_seq_offset is not None else None
    lengths = a.seq_lens.tolist()
    sequences = source.split(lengths) if source.dim() == 3 else list(source)
    heads = source.shape[-2]
    for b, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        for h in range(heads):
            task = b * heads + h
            if slots[task] >= 0:
                run = _compressed(
                    sequence[:length, h], scatter_mode, lens[task], starts[task] if starts else -1
                )
                targets = torch.arange(slots[task], slots[task] + len(run))
                _scatter(run[:, None], cache, targets)


def _compressed(x: Tensor, scatter_mode: str, w: int, o: int) -> Tensor:
    """The rows (L, D) of one batch and head that are written."""
    if scatter_mode == "Alibi":
        return x[len(x) - w :]
    if o == -1 or o == len(x) or w == 0:
        return x
    parts = [x[:o], x[o + w :]]
    if scatter_mode == "Rope":
        parts.insert(1, _mean(x[o : o + w])[None])
    # Concatenated as bytes: torch cannot do it in every dtype. Without copies, an axis of one
    # element may keep a stride that no view of bytes has.
    copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return torch.cat([copy.view(torch.uint8) for copy in copies]).view(x.dtype)


def _mean(window: Tensor) -> Tensor:
    """In fp32 in the order of the tokens, rounded half to even."""
    dtype = torch.float64 if window.dtype == torch.float64 else torch.float32
    total = torch.zeros(window.shape[1], dtype=dtype)
    for row in window:
        total = total + row.to(dtype)
    mean = total / len(window)
    if window.dtype.is_floating_point:
        return mean.to(window.dtype)
    limits = torch.iinfo(window.dtype)
    return mean.round().double().clamp(limits.min, limits.max).long().to(window.dtype)
