"""Calls that scatter_pa_kv_cache_ must refuse, before it writes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from ascend_attn_check.samples.scatter_pa_kv_cache import CASES, SCATTER_PA_KV_CACHE, CacheCase
from ascend_attn_ops.reference.call import Sample
from torch import Tensor

from .wrong_call import WrongCall, elsewhere, flatter, longer, wrong_call

NORM = CacheCase()
INT64 = CacheCase(index=torch.int64)
NZ = CacheCase(cache_mode="PA_NZ")
NCT = CacheCase("Nct")
ALIBI = CacheCase("Alibi", lengths=(9, 0, 5, 3), blocks=(6, 8))
ROPE, OMNI = replace(ALIBI, scatter="Rope"), replace(ALIBI, scatter="Omni")
TAILS = CacheCase("Alibi", rank=4, rows=9, lengths=(9, 0, 5), blocks=(6, 8))
WINDOWS = replace(TAILS, scatter="Rope")
OF_INT8 = next(case for case in CASES if case.int8_key)

INVALID, NULL, RANK = "161002", "161001", "561002"


wrong = partial(wrong_call, SCATTER_PA_KV_CACHE, code=INVALID)
wrong_value = partial(wrong, on_meta=False)


def item(at: int, number: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[at] = number
        return x

    return change


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def narrower(x: Tensor) -> Tensor:
    return x[..., :16].contiguous()


def window(width: int, start: int) -> dict[str, Any]:
    """Arguments of the first task, which has a slot and, in ROPE, OMNI and WINDOWS, a window."""
    return {"compress_lens": item(0, width), "compress_seq_offset": item(0, start)}


KEY_ONLY = {"value": None, "value_cache": None}


def tensor_rules() -> Iterator[WrongCall]:
    """Rank, dtype, device and extents of every tensor in every scenario."""
    for case in (NORM, NZ, NCT, ALIBI, ROPE, OMNI, TAILS, WINDOWS):
        sample = SCATTER_PA_KV_CACHE.make(case, torch.bfloat16)
        for name, x in sample.tensors.items():
            is_row, is_cache = name in ("key", "value"), name.endswith("_cache")
            # A key of rank 3 is not wrong in itself, but not what the value has.
            named = "value" if name == "key" and case.rank == 4 else name
            rank = RANK if is_row or is_cache else INVALID
            yield wrong(case, f"{named}: ", code=rank, **{name: flatter})
            # Keys may have one axis more, and so may the caches of PA_NZ.
            added = (None, None) if name == "key" or (is_cache and case is NZ) else (None,)
            yield wrong(case, id="axes", code=rank, **{name: lambda x, added=added: x[added]})
            if is_row or is_cache:
                # key is the measure of the others.
                # PA_NZ takes half types that differ: then value_cache is of the wrong one.
                named = "key_cache" if name == "key" else name
                named = "value_cache" if name == "value" and case is NZ else named
                yield wrong(case, f"{named}: ", TypeError, **{name: Tensor.half})
                yield wrong(case, "", TypeError, **{name: Tensor.cfloat})
            elif name == "slot_mapping":
                yield wrong(case, "", TypeError, slot_mapping=Tensor.short)
                yield wrong(case, "", TypeError, slot_mapping=Tensor.float)
                if case.is_run:
                    yield wrong(case, "compress_lens: ", TypeError, slot_mapping=Tensor.long)
            else:
                yield wrong(case, "", TypeError, **{name: Tensor.long})
            if name != "key":
                yield wrong(case, **{name: elsewhere})
            if not is_row:
                yield wrong(case, **{name: with_gaps})
            named = {
                "key": "key|key_cache|value|slot_mapping", "value": "value|value_cache",
                "seq_lens": "slot_mapping|seq_lens",
            }.get(name, name)  # fmt: skip
            for axis in range(x.dim()):
                # Both caches have two axes in common: key_cache's are the truth.
                if name != "key_cache" or axis not in (0, 1 if case is not NZ else 2):
                    yield wrong(case, f"{named}: ", id=axis, **{name: longer(axis)})


MODE_RULES = [
    *(wrong(NORM, id=mode, cache_mode=mode) for mode in ("", "norm", "pa_nz", "NZ")),
    *(wrong(NORM, id=mode, scatter_mode=mode) for mode in ("", "none", "nct", "rope", "ALIBI")),
    wrong(NORM, code=NULL, value_cache=None),
    wrong(NORM, code=NULL, value=None),
    *(
        wrong(case, "", NotImplementedError, **KEY_ONLY)
        for case in (NZ, ALIBI, ROPE, OMNI, TAILS, WINDOWS)
    ),
    *(
        wrong(case, code=NULL, **{name: None})
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for name in ("compress_lens", "seq_lens")
    ),
    wrong(ROPE, code=NULL, compress_seq_offset=None),
    wrong(OMNI, code=NULL, compress_seq_offset=None),
    wrong(ALIBI, compress_seq_offset=torch.zeros(8).int()),
    *(
        wrong(case, **{name: torch.zeros(7, dtype=torch.int32)})
        for case in (NORM, NZ, NCT)
        for name in ("compress_lens", "compress_seq_offset", "seq_lens")
    ),
    wrong(NORM, id="three", strides=[1, 1, 1]),
    wrong(NORM, offsets=[]),
    wrong(NCT, id="zero", strides=[0, 70]),
    wrong(NCT, id="negative", strides=[70, -70]),
    wrong(NCT, id="negative", offsets=[0, -1]),
    # Strides and offsets of another mode.
    wrong(NORM, strides=[99, 1]),
    wrong(ALIBI, offsets=[-5, 0]),
    wrong(NZ, "strides: ", scatter_mode="Nct", strides=[70, 70]),
    wrong(NZ, "offsets: ", scatter_mode="Nct", offsets=[1, 0]),
    # Rows of rank 4.
    wrong(TAILS, cache_mode="PA_NZ"),
    wrong(TAILS, scatter_mode="Nct"),
    wrong(WINDOWS, "compress_seq_offset: ", scatter_mode="Alibi"),
    wrong(TAILS, "compress_seq_offset: ", code=NULL, scatter_mode="Rope"),
    wrong(TAILS, "compress_seq_offset: ", code=NULL, scatter_mode="Omni"),
    wrong(NZ, id="5 axes", key_cache=lambda x: x.unflatten(1, (1, -1))),
    wrong(NZ, id="5 axes", value_cache=lambda x: x.unflatten(1, (1, -1))),
    wrong(NCT, key=with_gaps),
    wrong(NCT, value=with_gaps),
    wrong(replace(NZ, d=(32, 32)), id="48 bytes", key=lambda x: x[..., :24]),
    wrong(replace(NZ, d=(32, 32)), id="48 bytes", value=lambda x: x[..., :24]),
    # Beside keys of int8.
    wrong(OF_INT8, "value: dtype int8", TypeError, value=Tensor.float, value_cache=Tensor.float),
    *(wrong(case, id="D", value=narrower, value_cache=narrower) for case in (ROPE, OMNI, WINDOWS)),
]


def value_rules() -> Iterator[WrongCall]:
    for case in (NORM, INT64, NZ, NCT):
        yield wrong_value(case, id="beyond", slot_mapping=item(5, 32))
    yield wrong_value(INT64, id="far beyond", slot_mapping=item(6, 2**62))
    for case in (ALIBI, TAILS):
        for slot in (46, 48, 2**31 - 1):
            change = {"slot_mapping": item(0, slot), "compress_lens": item(0, 3)}
            yield wrong_value(case, id=slot, **change)
    for case in (ROPE, OMNI, WINDOWS):
        yield wrong_value(case, id="beyond", slot_mapping=item(0, 48))
        # A window of 3 leaves 7 or 6 of 9 rows. The others leave all.
        left = 6 if case is OMNI else 7
        for width, start, slot in ((3, 4, 49 - left), (3, -1, 40), (0, 4, 40), (3, 9, 40)):
            change = {"slot_mapping": item(0, slot), **window(width, start)}
            yield wrong_value(case, id=(width, start), **change)
        for width, start in ((3, 7), (3, -2), (3, 10), (1, 2**30)):
            change = window(width, start)
            yield wrong_value(case, "compress_seq_offset: ", id=(width, start), **change)
    for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS):
        for name, numbers in (("compress_lens", (-1, 10)), ("seq_lens", (-1, 18))):
            for number in numbers:
                at = 1 if name == "seq_lens" else 0
                yield wrong_value(case, id=number, **{name: item(at, number)})
    for case in (ALIBI, ROPE, OMNI):
        for number in (2, 4):
            yield wrong_value(case, id=f"sum {number}", seq_lens=item(3, number))
    # 7 rows of 64 elements at 70 elements from each other, in a buffer of 7 * 69 and 7 * 70.
    for expected, name, numbers in (
        ("key: ", "strides", [71, 70]), ("value: ", "strides", [69, 72]),
        ("key: ", "offsets", [6, 0]), ("key: ", "strides", [2**62, 70]),
        ("key: ", "offsets", [2**63 - 1, 0]),
    ):  # fmt: skip
        yield wrong_value(NCT, expected, id=numbers, **{name: numbers})


def overlap_rules() -> Iterator[WrongCall]:
    """Yields caches and rows in the same memory."""
    twice = {"change": lambda sample: sample.replace(value_cache=sample.inputs["key_cache"])}
    yield wrong_value(NORM, "value_cache: ", **twice)
    for source, cache, step in product(("key", "value"), ("key_cache", "value_cache"), (1, 2)):

        def change(sample: Sample, source: str = source, cache: str = cache, step: int = step):
            rows = sample.inputs[cache].flatten(0, 1)[: 7 * step : step]
            return sample.replace(**{source: rows})

        yield wrong_value(NORM, f"{source}: ", id=f"{cache} {step}", change=change)


DEVICE_RULES = [
    *(wrong(case, "key: ", limits=limits) for case in (TAILS, WINDOWS) for limits in ("A2", "A3")),
    *(
        wrong(replace(case, index=torch.int64), "slot_mapping: ", limits=limits)
        for case in (ALIBI, ROPE, OMNI)
        for limits in ("A2", "A3")
    ),
    *(wrong(replace(case, d=(24, 24)), "key: ", limits="A2") for case in (ROPE, OMNI)),
    *(
        wrong(NORM, "key: ", TypeError, limits="A2", dtype=dtype)
        for dtype in (torch.float32, torch.uint8, torch.int32, torch.float8_e5m2, torch.float64)
    ),
    wrong(NORM, "key: ", TypeError, limits="950", dtype=torch.float64),
    wrong(NORM, limits="950", **KEY_ONLY),
    *(wrong(case, "key: ", limits="950") for case in (ALIBI, ROPE, OMNI)),
    wrong(NORM, "product: ", NotImplementedError, limits="310P"),
]

WRONG_CALLS = [*tensor_rules(), *MODE_RULES, *value_rules(), *overlap_rules(), *DEVICE_RULES]
