"""scatter_pa_kv_cache_ in plain torch: spec/scatter_pa_kv_cache.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scatter_pa_kv_cache_(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor | None = None,
    value_cache: Tensor | None = None,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offset: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str = "Norm",
    scatter_mode: str = "None",
    strides: Sequence[int] = (1, 1),
    offsets: Sequence[int] = (0, 0),
) -> None:
    """Scenario 3 for keys of rank 4, otherwise what the modes select (section 2)."""
    if key.dim() == 4:
        scatter_mode = "Alibi" if compress_seq_offset is None else "Rope"
    pairs = [(key, key_cache), (value, value_cache)]
    for (source, cache), stride, offset in zip(pairs, strides, offsets, strict=True):
        if source is None or cache is None:
            continue
        if key.dim() == 3 and cache_mode == "PA_NZ":
            _scatter_nz(source, cache, slot_mapping)
        elif scatter_mode in ("None", "Nct"):
            if scatter_mode == "Nct":
                source = _rows_of_buffer(source, stride, offset)
            _scatter(source, cache, slot_mapping)
        else:
            assert compress_lens is not None
            assert seq_lens is not None
            _scatter_runs(
                source, cache, slot_mapping, compress_lens, compress_seq_offset, seq_lens,
                scatter_mode,
            )  # fmt: skip


def _scatter(source: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = cache.shape[1]
    for row, slot in zip(source, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = row


def _scatter_nz(source: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Element c of a row goes to [block, c // L, position, c % L]."""
    block_size, last = cache.shape[2:]
    for row, slot in zip(source, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            cache[slot // block_size, :, slot % block_size] = row.reshape(-1, last)


def _rows_of_buffer(source: Tensor, stride: int, offset: int) -> Tensor:
    tokens, heads, size = source.shape
    return source.as_strided(
        (tokens, heads, size), (stride, size, 1), source.storage_offset() + offset
    )


def _scatter_runs(
    source: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    compress_lens: Tensor,
    compress_seq_offset: Tensor | None,
    seq_lens: Tensor,
    scatter_mode: str,
) -> None:
    slots, lens = slot_mapping.flatten().tolist(), compress_lens.flatten().tolist()
    starts = compress_seq_offset.tolist() if compress_seq_offset is not None else None
    lengths = seq_lens.tolist()
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
    """What is written of the rows (L, D) of one batch and head."""
    if scatter_mode == "Alibi":
        return x[len(x) - w :]
    if o == -1 or o == len(x) or w == 0:
        return x
    parts = [x[:o], x[o + w :]]
    if scatter_mode == "Rope":
        parts.insert(1, _mean(x[o : o + w])[None])
    # Concatenated as bytes: torch cannot do it in every dtype.
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(x.dtype)


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
