"""Valid calls of attention_update and scatter_pa_kv_cache_."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import ascend_attn_ops
import torch
from ascend_attn_check.samples import attention_update, scatter_pa_kv_cache
from ascend_attn_check.samples.attention_update import UpdateCase
from ascend_attn_check.samples.scatter_pa_kv_cache import CacheCase
from ascend_attn_ops import reference
from support.samples import Sample, bytes_of
from torch import Tensor

from . import draw
from .calls import FILLS, THREADS, check, poisoned_memory, run, threads
from .case import Case, Finding
from .memory import placed

FuzzedUpdate = draw.seeded(UpdateCase)
FuzzedCache = draw.seeded(CacheCase)


def update_call(random: Random, dtype: torch.dtype, empty: bool = False) -> Sample:
    d = draw.size(random, 300)
    rows = tuple(draw.size(random, 20) for _ in range(random.randint(0, 3)))
    if empty and (d == 0 or random.randrange(3)):
        rows = (*rows, 0)
    elif empty:
        d = 0
    case = FuzzedUpdate(
        seed=random.getrandbits(32), parts=random.choice((1, 1, 2, 2, 3, 5, 17)), rows=rows, d=d,
        without_keys=random.choice(("", "", "rows", "parts") if d else ("",)),
        offset=random.choice((0.0, 0.0, 0.0, 100.0, 1e4, -1e4)),
    )  # fmt: skip
    sample = attention_update.build(case, dtype)
    return draw.scaled(sample, [name for name in sample.tensors if "local_out" in name], random)


def update(random: Random, empty: bool = False) -> str:
    dtype = random.choice(draw.DTYPES)
    sample = update_call(random, dtype, empty)
    if random.random() < 0.1:
        sample, _ = draw.with_special(sample, list(sample.tensors), random)
    check(sample, run(sample, random, same_on_all_threads=True))
    return f"{len(sample.inputs['lse'])} parts {draw.name_of(dtype)}"


SCATTER_DTYPES = (
    torch.float16, torch.bfloat16, torch.int8, torch.float32, torch.uint8, torch.int16,
    torch.uint16, torch.int32, torch.uint32, torch.float8_e5m2, torch.float8_e4m3fn, torch.float64,
)  # fmt: skip


def cache_case(random: Random, dtype: torch.dtype) -> FuzzedCache:
    fields: dict[str, Any] = {
        "seed": random.getrandbits(32), "heads": random.randint(1, 4),
        "slots": random.choice(("some skipped", "some skipped", "all skipped", "all")),
        "index": random.choice((torch.int32, torch.int64)),
    }  # fmt: skip
    kind = random.choice(("Norm", "PA_NZ", "Nct", "Alibi", "Rope", "Omni", "rank 4"))
    aligned = 32 // dtype.itemsize
    rows = draw.size(random, 40)
    size = draw.head_size(random)
    if kind in ("Norm", "PA_NZ", "Nct"):
        block_size = random.choice((1, 2, 7, 8, 16))
        fields["blocks"] = -(-rows // block_size) + random.randint(1, 2), block_size
        fields["rows"] = rows
        fields["d"] = size, draw.head_size(random)
        if kind == "Norm":
            fields["slots"] = random.choice((fields["slots"], "in order"))
        if kind == "PA_NZ":
            fields["cache_mode"] = kind
            fields["d"] = tuple(aligned * random.randint(1, 4) for _ in range(2))
        else:
            fields["key_only"] = random.random() < 0.2
            fields["scatter"] = "None" if kind == "Norm" else kind
        return FuzzedCache(**fields)
    lengths = tuple(draw.size(random, 20) for _ in range(random.randint(0, 4)))
    fields["scatter"] = random.choice(("Alibi", "Rope")) if kind == "rank 4" else kind
    if kind == "rank 4":
        fields["rank"], fields["rows"] = 4, max(lengths, default=0) + random.randint(0, 2)
    block_size = random.choice((1, 2, 7, 8, 16))
    fields |= {
        "d": (aligned * random.randint(1, 4),) * 2, "lengths": lengths,
        "windows": random.choice(("some", "some", "none")),
        "blocks": (-(-sum(lengths) * fields["heads"] // block_size) + 1, block_size),
    }  # fmt: skip
    return FuzzedCache(**fields)


def without_rows(case: FuzzedCache) -> FuzzedCache:
    """Nothing to write, beside whatever else may be given."""
    rows = case.rows if case.rank == 4 else 0
    return replace(case, rows=rows, lengths=tuple(0 for _ in case.lengths))


def scatter(random: Random, empty: bool = False) -> str:
    """The caches have the bytes that they have after the reference, each time."""
    dtype = random.choice(SCATTER_DTYPES)
    case = cache_case(random, dtype)
    if empty:
        case = without_rows(case)
    sample = scatter_pa_kv_cache.build(case, dtype)
    expected = after(sample, reference, random, 1, FILLS[0])
    kind = "rank 4" if case.rank == 4 else f"{case.cache_mode} {case.scatter}"
    for namespace in (torch.ops.ascend, ascend_attn_ops):
        other = sample
        if case.scatter != "Nct" and random.random() < 0.6:  # whose sources have strides already
            sources = [name for name in ("key", "value") if name in sample.tensors]
            moved = placed(sample, random)
            other = sample.replace(**{name: moved.tensors[name] for name in sources})
        actual = after(other, namespace, random, random.choice(THREADS), random.choice(FILLS))
        for name, x in actual.items():
            if not torch.equal(x, expected[name]):
                differing = int((x != expected[name]).sum())
                raise Finding(f"{sample.id}: {differing} bytes of {name} differ")
    return f"{kind} {draw.name_of(dtype)}"


def after(
    sample: Sample, namespace: Any, random: Random, count: int, fill: int
) -> dict[str, Tensor]:
    """The bytes of all tensors after the call, which happens to copies of the caches."""
    caches = {n: x.clone() for n, x in sample.tensors.items() if n.endswith("_cache")}
    copy = sample.replace(**caches)
    with threads(count), poisoned_memory(fill):
        if copy.call(namespace) != ():
            raise Finding(f"{sample.id}: the call returned something")
    return {name: bytes_of(x) for name, x in copy.tensors.items()}


CASES: dict[str, Case] = {
    "valid/attention_update": update, "valid/scatter_pa_kv_cache_": scatter,
    "valid/empty/attention_update": partial(update, empty=True),
    "valid/empty/scatter_pa_kv_cache_": partial(scatter, empty=True),
}  # fmt: skip
