"""Both sides of each device rule of scatter_pa_kv_cache_, with the text of the error."""

from __future__ import annotations

import re
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor

OPERATOR = torch.ops.ascend.scatter_pa_kv_cache_
Arguments = dict[str, Any]
Device = tuple[Any, Any]

LIFTED = (
    "; on the CPU ascend_attn_ops.limits(None) lifts the device's limits "
    "[ACLNN_ERR_PARAM_INVALID 161002]"
)


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


@pytest.mark.parametrize(("devices", "good", "bad", "error"), BOUNDARIES, ids=str)
def test_both_sides(devices: list[Device], good: Arguments, bad: Arguments, error: str) -> None:
    for product, cann in devices:
        device = f"Ascend {product}"
        expected = error.format(device, v=f"{device} with CANN {cann}")
        text = f"ascend::scatter_pa_kv_cache_: {expected}{LIFTED}"
        with ops.limits(product, cann=cann):
            OPERATOR(**good)
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                OPERATOR(**bad)
    with ops.limits(None):
        OPERATOR(**bad)


ACCEPTED: list[tuple[list[Device], Arguments]] = [
    (OLD, runs("Rope", dtype=torch.int8, d=32)),
    (OLD, nz(65536)),
    (NEW, rows(t=0)),
    (NEW, FIVE_AXES),
    *(([("A2", "9.1"), ("A3", "9.1"), ("950", "9.1")], x) for x in (GAPS, BY_HEADS, NZ_GAPS)),
    ([("950", "9.0"), ("950", "9.1")], rows(t=33)),
    ([("950", "9.1")], FIVE_AXES),
    ([("950", "9.1")], nz(65536)),
]


@pytest.mark.parametrize(("devices", "arguments"), ACCEPTED, ids=str)
def test_accepted(devices: list[Device], arguments: Arguments) -> None:
    for product, cann in devices:
        with ops.limits(product, cann=cann):
            OPERATOR(**arguments)


@pytest.mark.parametrize("cann", ["8.5", "9.0"])
def test_950_ignores_the_modes(cann: Any) -> None:
    """A cache in fractal layout is then one of the wrong shape, and strides would be ignored."""
    with ops.limits("950", cann=cann):
        OPERATOR(**rows(cache_mode="PA_NZ", scatter_mode="Omni"))
        with pytest.raises(ValueError, match=re.escape("(num_blocks, block_size, N, D)")):
            OPERATOR(**nz())
        with pytest.raises(ValueError, match=r"strides: expected \[1, 1\]"):
            OPERATOR(**rows(scatter_mode="Nct", strides=[7, 7]))


def test_950_obeys_the_modes_from_cann_9_1_on() -> None:
    with ops.limits("950", cann="9.1"):
        OPERATOR(**nz())
        with pytest.raises(ValueError, match=re.escape("(num_blocks, N * D / L, block_size, L)")):
            OPERATOR(**rows(d=32, cache_mode="PA_NZ"))
