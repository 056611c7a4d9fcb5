"""Calls that scatter_pa_kv_cache_ must refuse, before it writes anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from ascend_attn_ops.check.samples.scatter_pa_kv_cache import SCATTER_PA_KV_CACHE, CacheCase
from torch import Tensor

from .wrong_call import Change, Product, WrongCall, both, elsewhere, longer, put

NORM = CacheCase()
INT64 = CacheCase(index=torch.int64)
NZ = CacheCase(cache_mode="PA_NZ")
NCT = CacheCase("Nct")
ALIBI = CacheCase("Alibi", lengths=(9, 0, 5, 3), blocks=(6, 8))
ROPE, OMNI = replace(ALIBI, scatter="Rope"), replace(ALIBI, scatter="Omni")
TAILS = CacheCase("Alibi", rank=4, rows=9, lengths=(9, 0, 5), blocks=(6, 8))
WINDOWS = replace(TAILS, scatter="Rope")

INVALID, NULL, RANK = "161002", "161001", "561002"


def wrong(
    rule: str,
    case: CacheCase,
    argument: str,
    change: Change | dict[str, Any] | None,
    exception: type[Exception] = ValueError,
    code: str = INVALID,
    *,
    product: Product | None = None,
    on_meta: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> WrongCall:
    scenario = f"rank4-{case.scatter}" if case.rank == 4 else case.scatter
    scenario = case.cache_mode if case.cache_mode != "Norm" else scenario
    id = f"{scenario}{f'-{product}' if product else ''}-{argument}-{rule}"
    return WrongCall(
        id, SCATTER_PA_KV_CACHE, case, change, argument, exception, code=code, limits=product,
        on_meta=on_meta, dtype=dtype,
    )  # fmt: skip


def item(name: str, at: int, number: int) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[at] = number
        return x

    return put(name, change)


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


# The first task of these has a slot and, in the cases of ROPE, OMNI and WINDOWS, a window.
def window(width: int, start: int) -> Change:
    return both(item("compress_lens", 0, width), item("compress_seq_offset", 0, start))


KEY_ONLY = {"value": None, "value_cache": None}


def tensor_rules() -> list[WrongCall]:
    """Rank, dtype, device and extents of every tensor in every scenario."""
    rows: list[WrongCall] = []
    for case in (NORM, NZ, NCT, ALIBI, ROPE, OMNI, TAILS, WINDOWS):
        sample = SCATTER_PA_KV_CACHE.make(case, torch.bfloat16)
        for name, x in sample.tensors.items():
            is_row = name in ("key", "value")

            def bad(
                rule: str,
                change: Callable[[Tensor], object],
                argument: str = name,
                exception: type[Exception] = ValueError,
                code: str = INVALID,
                case: CacheCase = case,
                name: str = name,
            ) -> None:
                rows.append(
                    wrong(
                        rule, case, argument, put(name, change), exception, code,
                        on_meta=change is not elsewhere,
                    )
                )  # fmt: skip

            is_cache = name.endswith("_cache")
            code = RANK if is_row or is_cache else INVALID
            # A key of rank 3 is not wrong in itself, but not what the value has.
            named = "value" if name == "key" and case.rank == 4 else name
            bad("rank too low", lambda x: x[0], named, ValueError, code)
            # Keys may have one axis more, and so may the caches of PA_NZ.
            added = (None, None) if name == "key" or (is_cache and case is NZ) else (None,)
            bad("rank too high", lambda x, added=added: x[added], name, ValueError, code)
            if is_row or is_cache:
                # key is the measure of the others.
                # PA_NZ takes half types that differ: then value_cache is of the wrong one.
                named = "key_cache" if name == "key" else name
                named = "value_cache" if name == "value" and case is NZ else named
                bad("float16", Tensor.half, named, TypeError)
                bad("complex", lambda x: x.cfloat(), name, TypeError)
            elif name == "slot_mapping":
                bad("int16", Tensor.short, name, TypeError)
                bad("float32", Tensor.float, name, TypeError)
                others = case.is_run
                bad("int64 alone", Tensor.long, "compress_lens", TypeError) if others else None
            else:
                bad("int64 alone", Tensor.long, name, TypeError)
            if name != "key":
                bad("on another device", elsewhere)
            if not is_row:
                bad("not contiguous", with_gaps)
            for axis in range(x.dim()):
                if name.endswith("_cache") and axis in (0, 1 if case is not NZ else 2):
                    # Both caches have these: key_cache's are the truth.
                    if name == "value_cache":
                        bad(f"axis {axis} longer", longer(axis))
                elif name == "seq_lens":
                    bad(f"axis {axis} longer", longer(axis), r"slot_mapping|seq_lens")
                elif name == "key":
                    bad(f"axis {axis} longer", longer(axis), "key|key_cache|value|slot_mapping")
                else:
                    bad(
                        f"axis {axis} longer", longer(axis), "value|value_cache" if is_row else name
                    )
    return rows


MODE_RULES = [
    *(
        wrong(f"unknown {mode!r}", NORM, "cache_mode", {"cache_mode": mode})
        for mode in ("", "norm", "pa_nz", "NZ")
    ),
    *(
        wrong(f"unknown {mode!r}", NORM, "scatter_mode", {"scatter_mode": mode})
        for mode in ("", "none", "nct", "rope", "ALIBI")
    ),
    wrong("value alone", NORM, "value_cache", {"value_cache": None}, code=NULL),
    wrong("cache alone", NORM, "value", {"value": None}, code=NULL),
    *(
        wrong("missing", case, "value", KEY_ONLY, NotImplementedError)
        for case in (NZ, ALIBI, ROPE, OMNI, TAILS, WINDOWS)
    ),
    *(
        wrong("missing", case, name, {name: None}, code=NULL)
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for name in ("compress_lens", "seq_lens")
    ),
    *(
        wrong("missing", case, "compress_seq_offset", {"compress_seq_offset": None}, code=NULL)
        for case in (ROPE, OMNI)
    ),
    wrong("given", ALIBI, "compress_seq_offset", {"compress_seq_offset": torch.zeros(8).int()}),
    *(
        wrong("given", case, name, {name: torch.zeros(7, dtype=torch.int32)})
        for case in (NORM, NZ, NCT)
        for name in ("compress_lens", "compress_seq_offset", "seq_lens")
    ),
    wrong("three", NORM, "strides", {"strides": [1, 1, 1]}),
    wrong("none", NORM, "offsets", {"offsets": []}),
    wrong("zero", NCT, "strides", {"strides": [0, 70]}),
    wrong("negative", NCT, "strides", {"strides": [70, -70]}),
    wrong("negative", NCT, "offsets", {"offsets": [0, -1]}),
    wrong("of another mode", NORM, "strides", {"strides": [99, 1]}),
    wrong("of another mode", ALIBI, "offsets", {"offsets": [-5, 0]}),
    wrong("overruled", NZ, "strides", {"scatter_mode": "Nct", "strides": [70, 70]}),
    wrong("overruled", NZ, "offsets", {"scatter_mode": "Nct", "offsets": [1, 0]}),
    wrong("rank 4", TAILS, "cache_mode", {"cache_mode": "PA_NZ"}),
    wrong("rank 4", TAILS, "scatter_mode", {"scatter_mode": "Nct"}),
    wrong("rank 4", WINDOWS, "compress_seq_offset", {"scatter_mode": "Alibi"}),
    *(
        wrong(f"{mode} of rank 4", TAILS, "compress_seq_offset", {"scatter_mode": mode}, code=NULL)
        for mode in ("Rope", "Omni")
    ),
    *(
        wrong("5 axes", NZ, name, put(name, lambda x: x.unflatten(1, (1, -1))))
        for name in ("key_cache", "value_cache")
    ),
    wrong("not contiguous", NCT, "key", put("key", with_gaps)),
    wrong("not contiguous", NCT, "value", put("value", with_gaps)),
    wrong("D of 48 bytes", replace(NZ, d=(32, 32)), "key", put("key", lambda x: x[..., :24])),
    wrong("D of 48 bytes", replace(NZ, d=(32, 32)), "value", put("value", lambda x: x[..., :24])),
    *(
        wrong(
            "D differs", case, "value",
            both(put("value", lambda x: x[..., :16]),
                 put("value_cache", lambda x: x[..., :16].contiguous())),
        )
        for case in (ROPE, OMNI, WINDOWS)
    ),
]  # fmt: skip

VALUE_RULES = [
    *(
        wrong("beyond", case, "slot_mapping", item("slot_mapping", 5, 32), on_meta=False)
        for case in (NORM, INT64, NZ, NCT)
    ),
    wrong("far beyond", INT64, "slot_mapping", item("slot_mapping", 6, 2**62), on_meta=False),
    *(
        wrong("beyond", case, "slot_mapping", item("slot_mapping", 0, 48), on_meta=False)
        for case in (ROPE, OMNI, WINDOWS)
    ),
    *(
        wrong(
            "run beyond", case, "slot_mapping",
            both(item("compress_lens", 0, 3), item("slot_mapping", 0, slot)), on_meta=False,
        )
        for case in (ALIBI, TAILS)
        for slot in (46, 48, 2**31 - 1)
    ),
    # A window of 3 leaves 7 or 6 of 9 rows.
    *(
        wrong(
            "run beyond", case, "slot_mapping",
            both(window(3, 4), item("slot_mapping", 0, 48 - n + 1)), on_meta=False,
        )
        for case, n in ((ROPE, 7), (OMNI, 6), (WINDOWS, 7))
    ),
    *(
        wrong("whole run beyond", case, "slot_mapping",
            both(window(width, start), item("slot_mapping", 0, 40)), on_meta=False)
        for case in (ROPE, OMNI, WINDOWS)
        for width, start in ((3, -1), (0, 4), (3, 9))
    ),
    *(
        wrong(f"of {n}", case, "compress_lens", item("compress_lens", 0, n), on_meta=False)
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for n in (-1, 10)
    ),
    *(
        wrong(f"{start}+{width}", case, "compress_seq_offset", window(width, start), on_meta=False)
        for case in (ROPE, OMNI, WINDOWS)
        for width, start in ((3, 7), (3, -2), (3, 10), (1, 2**30))
    ),
    *(
        wrong("sum too small", case, "seq_lens", item("seq_lens", 3, 2), on_meta=False)
        for case in (ALIBI, ROPE, OMNI)
    ),
    *(
        wrong("sum too large", case, "seq_lens", item("seq_lens", 3, 4), on_meta=False)
        for case in (ALIBI, ROPE, OMNI)
    ),
    *(
        wrong(f"of {n}", case, "seq_lens", item("seq_lens", 1, n), on_meta=False)
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for n in (-1, 18)
    ),
    # 7 rows of 64 elements at 70 elements from each other, in a buffer of 7 * 69 and 7 * 70.
    wrong("past the buffer", NCT, "key", {"strides": [71, 70]}, on_meta=False),
    wrong("past the buffer", NCT, "value", {"strides": [69, 72]}, on_meta=False),
    wrong("past the buffer", NCT, "key", {"offsets": [6, 0]}, on_meta=False),
    wrong("far past the buffer", NCT, "key", {"strides": [2**62, 70]}, on_meta=False),
    wrong("far past the buffer", NCT, "key", {"offsets": [2**63 - 1, 0]}, on_meta=False),
    wrong(
        "key_cache again", NORM, "value_cache",
        lambda s: s.replace(value_cache=s.inputs["key_cache"]), on_meta=False,
    ),
    *(
        wrong(
            f"{'with gaps, ' if step > 1 else ''}in {cache}", NORM, source,
            lambda s, source=source, cache=cache, step=step: s.replace(
                **{source: s.inputs[cache].flatten(0, 1)[: 7 * step : step]}
            ),
            on_meta=False,
        )
        for source in ("key", "value")
        for cache in ("key_cache", "value_cache")
        for step in (1, 2)
    ),
]  # fmt: skip


DEVICE_RULES = [
    *(
        wrong("rank 4", case, "key", None, product=product)
        for case in (TAILS, WINDOWS)
        for product in ("A2", "A3")
    ),
    *(
        wrong("int64", replace(case, index=torch.int64), "slot_mapping", None, product=product)
        for case in (ALIBI, ROPE, OMNI)
        for product in ("A2", "A3")
    ),
    *(
        wrong("D of 48 bytes", replace(case, d=(24, 24)), "key", None, product="A2")
        for case in (ROPE, OMNI)
    ),
    *(
        wrong(str(dtype), NORM, "key", None, TypeError, product="A2", dtype=dtype)
        for dtype in (torch.float32, torch.uint8, torch.int32, torch.float8_e5m2, torch.float64)
    ),
    wrong("float64", NORM, "key", None, TypeError, product="950", dtype=torch.float64),
    wrong("none", NORM, "value", KEY_ONLY, product="950"),
    *(wrong("rank 3", case, "key", None, product="950") for case in (ALIBI, ROPE, OMNI)),
    wrong("not there", NORM, "product", None, NotImplementedError, product="310P"),
]

WRONG_CALLS = [*tensor_rules(), *MODE_RULES, *VALUE_RULES, *DEVICE_RULES]
