"""Both sides of each device rule of scatter_pa_kv_cache_, with the text of the error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rule import Rule

Arguments = dict[str, Any]
Device = tuple[Any, Any]


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scatter(key: Tensor, cache: Tensor, **options: Any) -> Arguments:
    """Key and value, each into such a cache."""
    tensors = {"key": key, "value": key, "key_cache": cache, "value_cache": torch.empty_like(cache)}
    if cache.stride() != tensors["value_cache"].stride():
        tensors["value_cache"] = cache
    slots = {"slot_mapping": meta(key.shape[0], dtype=torch.int32)}
    return tensors | slots | options


def rows(t: int = 32, n: int = 2, d: int = 16, blocks: int = 2, **options: Any) -> Arguments:
    return scatter(meta(t, n, d), meta(blocks, 16, n, d), **options)


def nz(block_size: int = 16, t: int = 32, blocks: int = 2) -> Arguments:
    return scatter(meta(t, 2, 32), meta(blocks, 4, block_size, 16), cache_mode="PA_NZ")


def runs(
    mode: str, t: int = 32, d: int = 16, b: int = 3, dtype: torch.dtype = torch.float16
) -> Arguments:
    def indices(count: int) -> Tensor:
        return meta(count, dtype=torch.int32)

    options: Arguments = {
        "slot_mapping": indices(2 * b), "compress_lens": indices(2 * b), "seq_lens": indices(b)
    }  # fmt: skip
    if mode != "Alibi":
        options["compress_seq_offset"] = indices(2 * b)
    key = meta(t, 2, d, dtype=dtype)
    return scatter(key, meta(2, 16, 1, d, dtype=dtype), scatter_mode=mode, **options)


def nct(elements: int, t: int, stride: int, offset: int) -> Arguments:
    """Rows of 8 elements, in a buffer of so many."""
    key = meta(elements)[: t * 8].view(t, 1, 8)
    options = {"strides": [stride] * 2, "offsets": [offset] * 2}
    return scatter(key, meta(2, 16, 1, 8), scatter_mode="Nct", **options)


FIVE_AXES = scatter(meta(32, 2, 32), meta(2, 2, 2, 16, 16), cache_mode="PA_NZ")
GAPS = scatter(meta(32, 2, 16), meta(2, 2, 16, 2, 16)[:, 0])
BY_HEADS = scatter(meta(32, 2, 16), meta(2, 2, 16, 16).transpose(1, 2))
NZ_GAPS = scatter(meta(32, 2, 32), meta(2, 2, 4, 16, 16)[:, 0], cache_mode="PA_NZ")
MISSING_SLOTS = "key_cache: expected num_blocks * block_size >= T on {}, got 32 for T = 33"
HALF_RUNS = (
    "key: expected dtype float16 or bfloat16 in scatter modes 'Rope' and 'Omni' on {v}, got int8"
)
EMPTY = "expected T, N, D, B and block_size of at least 1 on {v}, got"

ATLAS = [(p, v) for p in ("A2", "A3") for v in ("8.5", "9.0", "9.1")]
OLD = [(p, "8.5") for p in ("A2", "A3")]
NEW = [(p, v) for p in ("A2", "A3") for v in ("9.0", "9.1")]

# On these devices, calls that are taken and refused, and what the error says; {} is the product,
# {v} the product and the version of CANN.
BOUNDARIES: list[tuple[list[Device], Arguments, Arguments, str]] = [
    (ATLAS, rows(t=32), rows(t=33), MISSING_SLOTS),
    (ATLAS, nz(t=32), nz(t=33), MISSING_SLOTS),
    *((ATLAS, runs(mode), runs(mode, t=33), MISSING_SLOTS) for mode in ("Alibi", "Rope", "Omni")),
    *(
        (NEW, runs(mode), runs(mode, dtype=torch.int8, d=32), HALF_RUNS)
        for mode in ("Rope", "Omni")
    ),
    (
        NEW, nz(65535), nz(65536),
        "key_cache: expected block_size (positions per block in cache mode 'PA_NZ') to be "
        "0..65535 on {v}, got 65536",
    ),
    (
        ATLAS, runs("Rope", d=1472), runs("Rope", d=1488),
        "key: expected D (head size in scatter mode 'Rope') to be 0..1472 on {}, got 1488",
    ),
    (OLD, rows(t=1), rows(t=0), f"key: {EMPTY} T = 0"),
    (OLD, rows(n=1), rows(n=0), f"key: {EMPTY} N = 0"),
    (OLD, rows(d=1), rows(d=0), f"key: {EMPTY} D = 0"),
    (OLD, runs("Alibi", b=1), runs("Alibi", b=0), f"seq_lens: {EMPTY} B = 0"),
    (
        OLD, nz(), scatter(meta(1, 2, 32), meta(2, 4, 0, 16), cache_mode="PA_NZ"),
        f"key_cache: {EMPTY} block_size = 0",
    ),
    (OLD, nz(), FIVE_AXES, "key_cache: expected rank 4 on {v}, got rank 5"),
    *(
        (
            [(p, v) for p in ("A2", "A3", "950") for v in ("8.5", "9.0")],
            rows(), strided,
            "key_cache: expected a contiguous tensor on {v}, got strides "
            f"{list(strided['key_cache'].stride())}",
        )
        for strided in (GAPS, BY_HEADS)
    ),
    (
        [("950", "9.1")], nct(257, 4, 80, 8), nct(256, 4, 80, 8),
        "key: expected a buffer that goes on behind the last row in scatter mode 'Nct' on {v}, "
        "got 4 rows of 8 elements in one of 256",
    ),
    *(
        (
            [("950", "9.1")], rows(), runs(mode),
            "key: expected rank 4 in scatter modes 'Alibi', 'Rope' and 'Omni' on {v}, got rank 3 "
            f"with scatter_mode '{mode}'",
        )
        for mode in ("Alibi", "Rope", "Omni")
    ),
]  # fmt: skip


def rules() -> Iterator[Rule]:
    for devices, good, bad, error in BOUNDARIES:
        yield Rule(
            "scatter_pa_kv_cache_", error, tuple(f"{x}:{cann}" for x, cann in devices),
            partial(dict, good), partial(dict, bad),
        )  # fmt: skip
