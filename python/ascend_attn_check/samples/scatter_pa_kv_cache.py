"""Samples of scatter_pa_kv_cache_: every scenario, with caches of random bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from ascend_attn_ops._core.pages import nz_cache_shape
from ascend_attn_ops.reference.call import Sample
from torch import Tensor

from .randomness import Random
from .record import Operator


@dataclass(frozen=True)
class CacheCase:
    scatter: str = "None"  # scatter_mode; with cache_mode "PA_NZ" or rank 4 see below
    rows: int = 7  # T, or S for rank 4
    heads: int = 2
    d: tuple[int, int] = (32, 32)  # Dk, Dv
    blocks: tuple[int, int] = (4, 8)  # num_blocks, block_size
    # For scenarios that write runs: rows per sequence, and what becomes of each head's rows.
    lengths: tuple[int, ...] = ()
    windows: str = "some"  # "none": every compress_lens is 0
    cache_mode: str = "Norm"
    rank: int = 3
    slots: str = "some skipped"  # or "all skipped", "all", "in order"
    index: torch.dtype = torch.int32
    key_only: bool = False
    int8_key: bool = False

    @property
    def id(self) -> str:
        parts = [f"rank{self.rank}"] if self.rank == 4 else []
        parts += [self.cache_mode, self.scatter] if self.rank == 3 else []
        parts += ["windows" if self.scatter != "Alibi" else "tails"] if self.rank == 4 else []
        parts += ["L" + "+".join(map(str, self.lengths))] if self.is_run else []
        parts += [f"T{self.rows}-N{self.heads}-D{self.d[0]}x{self.d[1]}"]
        parts += [f"blocks{self.blocks[0]}x{self.blocks[1]}", self.slots.replace(" ", "_")]
        parts += ["key_only"] if self.key_only else []
        parts += ["int8_key"] if self.int8_key else []
        parts += ["no_windows"] if self.windows == "none" else []
        parts += ["int64"] if self.index == torch.int64 else []
        return "-".join(parts)

    @property
    def is_run(self) -> bool:
        return self.scatter in ("Alibi", "Rope", "Omni")

    @property
    def averages(self) -> bool:
        return self.scatter == "Rope"

    @property
    def capacity(self) -> int:
        return self.blocks[0] * self.blocks[1]


_NZ = CacheCase(cache_mode="PA_NZ")
_ALIBI = CacheCase("Alibi", lengths=(9, 0, 5, 3), blocks=(6, 8))
_PADDED = CacheCase("Alibi", rank=4, rows=9, lengths=(9, 0, 5), blocks=(6, 8))

CASES = [
    CacheCase(),
    CacheCase(d=(32, 48), heads=3, slots="all", index=torch.int64),
    CacheCase(rows=0),
    CacheCase(slots="all skipped"),
    CacheCase(rows=1, heads=1, d=(1, 5), blocks=(3, 1), slots="all"),
    CacheCase(rows=130, blocks=(2, 128)),
    CacheCase(rows=256, blocks=(2, 128), slots="in order", index=torch.int64),
    CacheCase(rows=700, heads=4, d=(128, 64), blocks=(800, 1)),  # more than one thread
    CacheCase(key_only=True),
    _NZ,
    replace(_NZ, rows=0),
    replace(_NZ, rows=130, heads=3, d=(64, 96), blocks=(2, 128)),
    replace(_NZ, rows=600, heads=4, d=(128, 64), blocks=(5, 128), slots="in order"),
    replace(_NZ, rows=700, heads=4, d=(128, 64), blocks=(800, 1), index=torch.int64),
    replace(_NZ, int8_key=True),
    CacheCase("Nct"),
    CacheCase("Nct", rows=0),
    CacheCase("Nct", rows=1, d=(16, 8), slots="all", index=torch.int64),
    CacheCase("Nct", rows=19, key_only=True),
    _ALIBI,
    replace(_ALIBI, d=(32, 64), slots="all", index=torch.int64),
    replace(_ALIBI, lengths=()),
    replace(_ALIBI, slots="all skipped"),
    replace(_ALIBI, lengths=(33, 1, 64), heads=1, blocks=(2, 128)),
    *(
        replace(_ALIBI, scatter=scatter, **changes)
        for scatter in ("Rope", "Omni")
        for changes in (
            {},
            {"slots": "all", "index": torch.int64},
            {"windows": "none"},
            {"lengths": (33, 1, 64), "heads": 1, "blocks": (100, 1)},
            {"lengths": (200, 300), "heads": 4, "d": (128, 128), "blocks": (20, 128)},
        )
    ),
    _PADDED,
    replace(_PADDED, slots="all", index=torch.int64, d=(32, 8)),
    replace(_PADDED, scatter="Rope"),
    replace(_PADDED, scatter="Rope", slots="all", windows="none", index=torch.int64),
    replace(_PADDED, scatter="Rope", rows=0, lengths=(0, 0)),
]


def build(case: CacheCase, dtype: torch.dtype) -> Sample:
    random = Random(f"{case.id}-{dtype}", dtype)
    new = random.numbers if case.averages else random.bytes
    # Beside keys of int8, values are int8 or of a half type.
    int8_key = case.int8_key and dtype in (torch.float16, torch.bfloat16)
    dtypes = (torch.int8 if int8_key else dtype, dtype)
    tensors: list[Tensor | None] = []
    strides, offsets = [1, 1], [0, 0]
    for i, (d, item) in enumerate(zip(case.d, dtypes, strict=True)):
        if case.scatter == "Nct":
            # A buffer with more columns before, between and after; the source is its beginning.
            size = case.heads * d
            strides[i], offsets[i] = size + 5 + i, 3 * i
            buffer = new(max(case.rows, 2), strides[i], dtype=item).flatten()
            source = buffer[: case.rows * size].view(case.rows, case.heads, d)
        elif case.rank == 4:
            source = new(len(case.lengths), case.rows, case.heads, d, dtype=item)
        else:
            rows = sum(case.lengths) if case.is_run else case.rows
            source = new(rows, case.heads, d, dtype=item)
        tensors += [source, random.bytes(*_cache_shape(case, d, item), dtype=item)]
    key, key_cache, value, value_cache = tensors
    options: dict[str, Any] = {"compress_lens": None, "compress_seq_offset": None, "seq_lens": None}
    if case.is_run:
        slots, options = _runs(case, random)
    else:
        slots = torch.tensor(_slots(case, random), dtype=case.index)
    # The last axis is contiguous in every key: with rank 4 the modes must not matter.
    options |= {"cache_mode": case.cache_mode, "strides": strides, "offsets": offsets}
    options["scatter_mode"] = case.scatter if case.rank == 3 else "None"
    inputs = {
        "key": key,
        "key_cache": key_cache,
        "slot_mapping": slots,
        "value": None if case.key_only else value,
        "value_cache": None if case.key_only else value_cache,
    }
    return Sample(SCATTER_PA_KV_CACHE.name, f"{case.id}-{dtype}", inputs, options)


def _cache_shape(case: CacheCase, d: int, dtype: torch.dtype) -> tuple[int, ...]:
    if case.cache_mode == "PA_NZ":
        return nz_cache_shape(*case.blocks, case.heads, d, dtype)
    return (*case.blocks, 1 if case.is_run else case.heads, d)


def _slots(case: CacheCase, random: Random) -> list[int]:
    order = random.permutation(case.capacity)
    if case.slots == "in order":
        order = list(range(case.capacity))
    slots = order[: case.rows]
    skipped = {"some skipped": 3, "all skipped": 1}.get(case.slots)
    # Any negative number skips.
    return [-1 - i if skipped and i % skipped == 0 else slot for i, slot in enumerate(slots)]


def _runs(case: CacheCase, random: Random) -> tuple[Tensor, dict[str, Any]]:
    """Runs of every length, one behind the other in random order, across the borders of blocks."""
    tasks = [length for length in case.lengths for _ in range(case.heads)]
    slots, lens, starts = [-1] * len(tasks), [0] * len(tasks), [-1] * len(tasks)
    free = 0
    for task in random.permutation(len(tasks)):
        length = tasks[task]
        lens[task] = 0 if case.windows == "none" else random.integer(0, length)
        starts[task] = random.integer(-1, length - lens[task])
        if task % 5 == 4:
            starts[task] = length  # counts as no window
        if case.slots == "all skipped" or (case.slots == "some skipped" and task % 4 == 3):
            slots[task], lens[task] = -7, 2**30  # nothing of a skipped run is read
            continue
        whole = starts[task] in (-1, length) or lens[task] == 0
        written = {
            "Alibi": lens[task],
            "Rope": length if whole else length - lens[task] + 1,
            "Omni": length if whole else length - lens[task],
        }[case.scatter]
        slots[task] = free
        free += written
    assert free <= case.capacity, f"{case.id} needs {free} slots"

    def indices(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=case.index)

    shape = (len(case.lengths), case.heads) if case.rank == 4 else (len(tasks),)
    options = {
        "compress_lens": indices(lens).view(shape),
        "compress_seq_offset": None if case.scatter == "Alibi" else indices(starts),
        "seq_lens": indices(list(case.lengths)),
    }
    return indices(slots).view(shape), options


SCATTER_PA_KV_CACHE = Operator("scatter_pa_kv_cache_", CASES, build, inference_only=True)

OPERATORS = [SCATTER_PA_KV_CACHE]
