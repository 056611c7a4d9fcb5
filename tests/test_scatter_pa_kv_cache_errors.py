"""Every rule of scatter_pa_kv_cache_ has a call that violates it, and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ascend_attn_ops as ops
import numpy as np
import pytest
import torch
from samples.sample import Sample
from samples.scatter_pa_kv_cache import CacheCase, build
from torch import Tensor
from torch.autograd import forward_ad

NORM = CacheCase()
INT64 = CacheCase(index=torch.int64)
NZ = CacheCase(cache_mode="PA_NZ")
NCT = CacheCase("Nct")
ALIBI = CacheCase("Alibi", lengths=(9, 0, 5, 3), blocks=(6, 8))
ROPE, OMNI = replace(ALIBI, scatter="Rope"), replace(ALIBI, scatter="Omni")
TAILS = CacheCase("Alibi", rank=4, rows=9, lengths=(9, 0, 5), blocks=(6, 8))
WINDOWS = replace(TAILS, scatter="Rope")

INVALID, NULL, RANK = "161002", "161001", "561002"
Change = Callable[[Sample], Sample]


@dataclass(frozen=True)
class Bad:
    rule: str
    case: CacheCase
    argument: str
    change: Change
    exception: type[Exception] = ValueError
    code: str = INVALID
    product: str | None = None
    # False where the rule is about values or memory, which fake tensors do not have.
    on_meta: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def id(self) -> str:
        scenario = f"rank4-{self.case.scatter}" if self.case.rank == 4 else self.case.scatter
        scenario = self.case.cache_mode if self.case.cache_mode != "Norm" else scenario
        product = f"-{self.product}" if self.product else ""
        return f"{scenario}{product}-{self.argument}-{self.rule}"


def option(**changes: object) -> Change:
    return lambda sample: sample.replace(**changes)


def put(name: str, function: Callable[[Tensor], object]) -> Change:
    return lambda sample: sample.replace(**{name: function(sample.arguments[name])})


def item(name: str, at: int, number: int) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[at] = number
        return x

    return put(name, change)


def both(*changes: Change) -> Change:
    def apply(sample: Sample) -> Sample:
        for change in changes:
            sample = change(sample)
        return sample

    return apply


def longer(axis: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat((x, x.narrow(axis, x.shape[axis] - 1, 1)), axis).contiguous()


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


# The first task of these has a slot and, in the cases of ROPE, OMNI and WINDOWS, a window.
def window(width: int, start: int) -> Change:
    return both(item("compress_lens", 0, width), item("compress_seq_offset", 0, start))


KEY_ONLY = option(value=None, value_cache=None)


def tensor_rules() -> list[Bad]:
    """Rank, dtype, device and extents of every tensor in every scenario."""
    rows: list[Bad] = []
    for case in (NORM, NZ, NCT, ALIBI, ROPE, OMNI, TAILS, WINDOWS):
        sample = build(case, torch.bfloat16)
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
                rows.append(Bad(rule, case, argument, put(name, change), exception, code))

            is_cache = name.endswith("_cache")
            code = RANK if is_row or is_cache else INVALID
            # A key of rank 3 is not wrong in itself, but not what the value has.
            named = "value" if name == "key" and case.rank == 4 else name
            bad("rank too low", lambda x: x[0], named, ValueError, code)
            added = (None, None) if name == "key" else (None,)
            bad("rank too high", lambda x, added=added: x[added], name, ValueError, code)
            if is_row or is_cache:
                # key is the measure of the others.
                bad("float16", Tensor.half, "key_cache" if name == "key" else name, TypeError)
                bad("complex", lambda x: x.cfloat(), name, TypeError)
            elif name == "slot_mapping":
                bad("int16", Tensor.short, name, TypeError)
                bad("float32", Tensor.float, name, TypeError)
                others = case.is_run
                bad("int64 alone", Tensor.long, "compress_lens", TypeError) if others else None
            else:
                bad("int64 alone", Tensor.long, name, TypeError)
            if name != "key":
                bad("on another device", lambda x: x.to("meta"))
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
        Bad(f"unknown {mode!r}", NORM, "cache_mode", option(cache_mode=mode))
        for mode in ("", "norm", "pa_nz", "NZ")
    ),
    *(
        Bad(f"unknown {mode!r}", NORM, "scatter_mode", option(scatter_mode=mode))
        for mode in ("", "none", "nct", "rope", "ALIBI")
    ),
    Bad("value alone", NORM, "value_cache", option(value_cache=None), code=NULL),
    Bad("cache alone", NORM, "value", option(value=None), code=NULL),
    *(
        Bad("missing", case, "value", KEY_ONLY, NotImplementedError)
        for case in (NZ, ALIBI, ROPE, OMNI, TAILS, WINDOWS)
    ),
    *(
        Bad("missing", case, name, option(**{name: None}), code=NULL)
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for name in ("compress_lens", "seq_lens")
    ),
    *(
        Bad("missing", case, "compress_seq_offset", option(compress_seq_offset=None), code=NULL)
        for case in (ROPE, OMNI)
    ),
    Bad("given", ALIBI, "compress_seq_offset", option(compress_seq_offset=torch.zeros(8).int())),
    *(
        Bad("given", case, name, option(**{name: torch.zeros(7, dtype=torch.int32)}))
        for case in (NORM, NZ, NCT)
        for name in ("compress_lens", "compress_seq_offset", "seq_lens")
    ),
    Bad("three", NORM, "strides", option(strides=[1, 1, 1])),
    Bad("none", NORM, "offsets", option(offsets=[])),
    Bad("zero", NCT, "strides", option(strides=[0, 70])),
    Bad("negative", NCT, "strides", option(strides=[70, -70])),
    Bad("negative", NCT, "offsets", option(offsets=[0, -1])),
    Bad("overruled", NZ, "strides", option(scatter_mode="Nct", strides=[70, 70])),
    Bad("overruled", NZ, "offsets", option(scatter_mode="Nct", offsets=[1, 0])),
    Bad("overruled", NORM, "strides", option(scatter_mode="Nct", strides=[7, 7]), product="950"),
    Bad("not contiguous", NCT, "key", put("key", with_gaps)),
    Bad("not contiguous", NCT, "value", put("value", with_gaps)),
    Bad("D of 48 bytes", replace(NZ, d=(32, 32)), "key", put("key", lambda x: x[..., :24])),
    Bad("D of 48 bytes", replace(NZ, d=(32, 32)), "value", put("value", lambda x: x[..., :24])),
    *(
        Bad(
            "D differs", case, "value",
            both(put("value", lambda x: x[..., :16]),
                 put("value_cache", lambda x: x[..., :16].contiguous())),
        )
        for case in (ROPE, OMNI, WINDOWS)
    ),
]  # fmt: skip

VALUE_RULES = [
    *(
        Bad("beyond", case, "slot_mapping", item("slot_mapping", 5, 32), on_meta=False)
        for case in (NORM, INT64, NZ, NCT)
    ),
    Bad("far beyond", INT64, "slot_mapping", item("slot_mapping", 6, 2**62), on_meta=False),
    *(
        Bad("beyond", case, "slot_mapping", item("slot_mapping", 0, 48), on_meta=False)
        for case in (ROPE, OMNI, WINDOWS)
    ),
    *(
        Bad(
            "run beyond", case, "slot_mapping",
            both(item("compress_lens", 0, 3), item("slot_mapping", 0, slot)), on_meta=False,
        )
        for case in (ALIBI, TAILS)
        for slot in (46, 48, 2**31 - 1)
    ),
    # Of 9 rows, a window of 3 leaves 7 or 6.
    *(
        Bad(
            "run beyond", case, "slot_mapping",
            both(window(3, 4), item("slot_mapping", 0, 48 - n + 1)), on_meta=False,
        )
        for case, n in ((ROPE, 7), (OMNI, 6), (WINDOWS, 7))
    ),
    *(
        Bad("whole run beyond", case, "slot_mapping",
            both(window(width, start), item("slot_mapping", 0, 40)), on_meta=False)
        for case in (ROPE, OMNI, WINDOWS)
        for width, start in ((3, -1), (0, 4), (3, 9))
    ),
    *(
        Bad(f"of {n}", case, "compress_lens", item("compress_lens", 0, n), on_meta=False)
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for n in (-1, 10)
    ),
    *(
        Bad(f"{start}+{width}", case, "compress_seq_offset", window(width, start), on_meta=False)
        for case in (ROPE, OMNI, WINDOWS)
        for width, start in ((3, 7), (3, -2), (3, 10), (1, 2**30))
    ),
    *(
        Bad("sum too small", case, "seq_lens", item("seq_lens", 3, 2), on_meta=False)
        for case in (ALIBI, ROPE, OMNI)
    ),
    *(
        Bad("sum too large", case, "seq_lens", item("seq_lens", 3, 4), on_meta=False)
        for case in (ALIBI, ROPE, OMNI)
    ),
    *(
        Bad(f"of {n}", case, "seq_lens", item("seq_lens", 1, n), on_meta=False)
        for case in (ALIBI, ROPE, OMNI, TAILS, WINDOWS)
        for n in (-1, 18)
    ),
    # 7 rows of 64 elements at 70 elements from each other, in a buffer of 7 * 69 and 7 * 70.
    Bad("past the buffer", NCT, "key", option(strides=[71, 70]), on_meta=False),
    Bad("past the buffer", NCT, "value", option(strides=[69, 72]), on_meta=False),
    Bad("past the buffer", NCT, "key", option(offsets=[6, 0]), on_meta=False),
    Bad("far past the buffer", NCT, "key", option(strides=[2**62, 70]), on_meta=False),
    Bad("far past the buffer", NCT, "key", option(offsets=[2**63 - 1, 0]), on_meta=False),
    Bad(
        "key_cache again", NORM, "value_cache",
        lambda s: s.replace(value_cache=s.inputs["key_cache"]), on_meta=False,
    ),
    *(
        Bad(
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


def same(sample: Sample) -> Sample:
    return sample


DEVICE_RULES = [
    *(
        Bad("rank 4", case, "key", same, product=product)
        for case in (TAILS, WINDOWS)
        for product in ("A2", "A3")
    ),
    *(
        Bad("int64", replace(case, index=torch.int64), "slot_mapping", same, product=product)
        for case in (ALIBI, ROPE, OMNI)
        for product in ("A2", "A3")
    ),
    *(
        Bad("D of 48 bytes", replace(case, d=(24, 24)), "key", same, product="A2")
        for case in (ROPE, OMNI)
    ),
    *(
        Bad(str(dtype), NORM, "key", same, TypeError, product="A2", dtype=dtype)
        for dtype in (torch.float32, torch.uint8, torch.int32, torch.float8_e5m2, torch.float64)
    ),
    Bad("float64", NORM, "key", same, TypeError, product="950", dtype=torch.float64),
    Bad("none", NORM, "value", KEY_ONLY, product="950"),
    # The modes have no effect there: what they need is then out of place.
    Bad("PA_NZ", NZ, "key_cache", same, product="950"),
    Bad("Alibi", ALIBI, "key_cache|compress_lens", same, product="950"),
    Bad("not there", NORM, "product", same, NotImplementedError, product="310P"),
]

TABLE = [*tensor_rules(), *MODE_RULES, *VALUE_RULES, *DEVICE_RULES]


def check_message(error: BaseException, row: Bad) -> None:
    assert re.fullmatch(
        rf"ascend::scatter_pa_kv_cache_: ({row.argument}): expected .+ \[ACLNN_\w+ {row.code}\]",
        str(error),
    ), f"got: {error}"


def call(row: Bad, sample: Sample) -> None:
    with ops.limits(row.product), pytest.raises(row.exception) as raised:
        sample.call(torch.ops.ascend)
    check_message(raised.value, row)


def of_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_every_rule_is_checked_before_anything_is_written(row: Bad) -> None:
    sample = row.change(build(row.case, row.dtype))
    before = {n: of_bytes(x.clone()) for n, x in sample.tensors.items() if x.device.type == "cpu"}
    call(row, sample)
    for name, bytes_before in before.items():
        assert torch.equal(of_bytes(sample.tensors[name]), bytes_before), name


# There, all tensors are on one device.
ON_META = [row for row in TABLE if row.on_meta and row.rule != "on another device"]


@pytest.mark.parametrize("row", ON_META, ids=lambda row: row.id)
def test_fake_tensors_are_checked_too(row: Bad) -> None:
    call(row, row.change(build(row.case, row.dtype).to("meta")))


def refused(argument: str, words: str, *tensors: Tensor, **options: object) -> None:
    """Of tensors that may lie in each other, whose bytes stay."""
    before = [of_bytes(x.clone()) for x in tensors]
    expected = rf"scatter_pa_kv_cache_: {argument}: expected .*{words}.* 161002"
    with pytest.raises(ValueError, match=expected):
        torch.ops.ascend.scatter_pa_kv_cache_(*tensors, **options)
    assert all(torch.equal(of_bytes(x), y) for x, y in zip(tensors, before, strict=True))


SLOTS = torch.tensor([1, 2, 0])


@pytest.mark.usefixtures("no_limits")
def test_rows_of_nct_are_where_offsets_and_strides_say() -> None:
    """Not where key is: that may be in the cache, and they may be behind it."""
    buffer = torch.arange(96.0)
    key, nct = buffer[:24].view(3, 1, 8), {"scatter_mode": "Nct", "strides": (8, 1)}
    refused(
        "key",
        "some of key_cache",
        key,
        buffer[32:64].view(1, 4, 1, 8),
        SLOTS,
        **nct,
        offsets=(24, 0),
    )
    cache, rows = buffer[:32].view(1, 4, 1, 8), buffer[40:64].clone().view(3, 1, 8)
    torch.ops.ascend.scatter_pa_kv_cache_(key, cache, SLOTS, **nct, offsets=(40, 0))
    assert torch.equal(cache[0, SLOTS], rows)


@pytest.mark.usefixtures("no_limits")
def test_a_cache_may_lie_between_the_rows() -> None:
    buffer = torch.arange(128.0).view(2, 64)
    key, slots = buffer[:, :8].view(2, 1, 8), SLOTS[:2]
    cache = buffer[0, 16:48].view(1, 4, 1, 8)
    torch.ops.ascend.scatter_pa_kv_cache_(key, cache, slots)
    assert torch.equal(cache[0, slots], key)
    refused("key", "some of key_cache", key, buffer[0, 4:36].view(1, 4, 1, 8), slots)


@pytest.mark.usefixtures("no_limits")
def test_indices_and_other_storages_are_not_in_a_cache() -> None:
    numbers = torch.ones(1, 4, 1, 8, dtype=torch.int32)
    indices = numbers.view(-1)[:2]
    refused("slot_mapping", "some of key_cache", numbers[0, :2].clone(), numbers, indices)
    for name in ("compress_lens", "compress_seq_offset", "seq_lens"):
        sample = build(ROPE, torch.int32)
        cache = sample.inputs["key_cache"]
        given = sample.options[name]
        inside = cache.view(-1)[: given.numel()].copy_(given)
        with pytest.raises(ValueError, match=f"{name}: expected memory of its own"):
            sample.replace(**{name: inside}).call(torch.ops.ascend)
    memory = np.arange(64, dtype=np.float32)
    key, cache = torch.from_numpy(memory)[:24], torch.from_numpy(memory)[8:40]
    refused("key", "some of key_cache", key.view(3, 1, 8), cache.view(1, 4, 1, 8), SLOTS)


@pytest.mark.parametrize("name", ["key", "key_cache", "value", "value_cache"])
def test_a_storage_must_hold_the_elements(name: str) -> None:
    sample = build(NORM, torch.bfloat16).clone()
    sample.arguments[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name}: expected a storage that holds every element"):
        sample.call(torch.ops.ascend)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_is_no_view_that_negates(name: str, mode: Callable[[], Any]) -> None:
    sample = build(NORM, torch.bfloat16)
    sample = sample.replace(**{name: torch._neg_view(sample.arguments[name])})
    refused_before = of_bytes(sample.arguments["key_cache"].clone())
    with mode(), pytest.raises(ValueError, match=f"{name}: expected .* a view that negates"):
        sample.call(torch.ops.ascend)
    assert torch.equal(of_bytes(sample.arguments["key_cache"].clone()), refused_before)


def test_a_key_may_be_a_view_that_negates() -> None:
    key, cache = torch.ones(3, 2, 16).half(), torch.zeros(2, 4, 2, 16).half()
    torch.ops.ascend.scatter_pa_kv_cache_(torch._neg_view(key), cache, SLOTS)
    assert torch.equal(cache[0, :3], -key)


def test_a_cache_of_inference_mode_is_written_there_alone() -> None:
    with torch.inference_mode():
        value_cache = torch.zeros(2, 4, 2, 16).half()
    key, key_cache = torch.ones(3, 2, 16).half(), torch.zeros(2, 4, 2, 16).half()
    refused("value_cache", "inference mode", key, key_cache, SLOTS, key.clone(), value_cache)
    with torch.inference_mode():
        torch.ops.ascend.scatter_pa_kv_cache_(key, key_cache, SLOTS, key, value_cache)
    assert torch.equal(key_cache, value_cache)
    assert key_cache.any()


def test_forward_mode_is_refused() -> None:
    """Or else the tangent of the rows would end in the cache, without a word."""
    key, key_cache = torch.ones(2, 1, 16).half(), torch.zeros(1, 4, 1, 16).half()
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"scatter_pa_kv_cache_: gradient: .* dual tensor"),
    ):
        torch.ops.ascend.scatter_pa_kv_cache_(
            forward_ad.make_dual(key, key), key_cache, torch.tensor([0, 1])
        )
    assert not key_cache.any()
