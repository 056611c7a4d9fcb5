"""Valid calls of sparse_flash_mla and its gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from ascend_attn_ops.check.samples import randomness, sparse_flash_mla
from ascend_attn_ops.check.samples.sparse_flash_mla import MlaCase
from support.samples import Sample

from . import draw
from .calls import check, run
from .case import Case
from .memory import with_expanded

PATTERNS = ("random", "padded", "first", "hole", "duplicates", "future", "unread")
KEYS = ("ori_kv", "cmp_kv")


FuzzedMla = draw.seeded(MlaCase)


def sequence(random: Random, most: int, ratio: int, derived: bool) -> tuple[int, int, int, int]:
    """Queries, original keys, compressed keys and the residual of one sequence."""
    queries, keys = draw.size(random, most), draw.size(random, most)
    if derived:
        return queries, keys, keys // ratio, keys % ratio
    return queries, keys, draw.size(random, most), random.randrange(ratio)


def mla_case(random: Random, paged: bool = False, empty: bool = False) -> FuzzedMla:
    """`empty`: an axis has no elements."""
    large = random.random() < 0.1
    most = 140 if large else 16
    ratio = random.choice((1, 2, 3, 4, 4, 8, 128))
    derived = random.random() < 0.5
    count = random.randint(0, 1 if large else 4)
    each = [sequence(random, most, ratio, derived) for _ in range(count)]
    if empty and count:
        each[random.randrange(count)] = (0, 0, 0, 0)
    lengths = tuple(tuple(x[side] for x in each) for side in range(3))
    fields: dict[str, Any] = {
        "seed": random.getrandbits(32),
        "layout": random.choice(("BSND", "TND")),
        "kind": random.choice(("swa", "hca", "csa", "csa")),
        "b": count,
        "s": tuple(max(side, default=0) + random.randint(0, 2) for side in lengths),
        "lengths": lengths,
        "residual": None if derived else tuple(x[3] for x in each),
        "ratio": ratio,
        "heads": random.choice((1, 1, 2, 3, 4, 5, 8, 16, 17, 33, 64) if not large else (1, 2, 64)),
        "d": 0 if empty and random.random() < 0.3 else draw.head_size(random),
        "k": max(1, draw.size(random, most)),
        "mode": random.choice((0, 3, 4, 4, 4)),
        "cmp_mode": random.choice((0, 3, 3)),
        "left": random.choice((-1, 0, 1, 3, 127)),
        "right": random.choice((-1, 0, 0, 2)),
        "sink": random.random() < 0.7,
        "pattern": random.choice(PATTERNS),
        "selection_heads": random.random() < 0.8,
        "lse": random.random() < 0.8,
    }
    if paged:
        fields["page"] = random.choice((1, 2, 3, 7, 16, 16, 128))
    elif fields["layout"] == "TND":
        fields["tail"] = random.choice(((0, 0, 0), (2, 3, 1), (0, 1, 2), (1, 0, 0)))
    elif derived and random.random() < 0.5:
        queries, keys, compressed, _ = sequence(random, most, ratio, derived)
        fields |= {"s": (queries, keys, compressed), "lengths": None}
    return FuzzedMla(**fields)


def label(case: MlaCase, dtype: torch.dtype) -> str:
    pages = " paged" if case.page else ""
    return f"{case.layout}{pages} {case.kind} mode {case.mode} {draw.name_of(dtype)}"


def forward_of(random: Random, case: MlaCase, dtype: torch.dtype) -> Sample:
    sample = sparse_flash_mla.build(case, dtype)
    if random.random() < 0.2:
        sample = draw.with_zeros(sample, ("query", *KEYS), random)
    sample = draw.scaled(sample, ("sink",), random, exponents=(-6, 4))
    sample = with_expanded(sample, ("query",) if case.page else ("query", *KEYS), random)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def attention(random: Random, paged: bool = False, empty: bool = False) -> str:
    case, dtype = mla_case(random, paged=paged, empty=empty), random.choice(draw.DTYPES)
    sample = forward_of(random, case, dtype)
    check(sample, run(sample, random, same_on_all_threads=True))
    return label(case, dtype)


def attention_gradient(random: Random, empty: bool = False) -> str:
    case, dtype = replace(mla_case(random, empty=empty), lse=True), random.choice(draw.DTYPES)
    forward = forward_of(random, case, dtype)
    outputs = forward.call(sparse_flash_mla.reference)
    d_out = randomness.Random(case.id, dtype).normal(*outputs[0].shape)
    sample = sparse_flash_mla.gradient_call(forward, outputs, d_out)
    sample = with_expanded(draw.scaled(sample, ("d_out",), random), ("d_out",), random)
    check(sample, run(sample, random, same_on_all_threads=False))
    return label(case, dtype)


CASES: dict[str, Case] = {
    "valid/sparse_flash_mla": attention,
    "valid/sparse_flash_mla_grad": attention_gradient,
    "valid/paged/sparse_flash_mla": partial(attention, paged=True),
    "valid/empty/sparse_flash_mla": partial(attention, empty=True),
    "valid/empty/sparse_flash_mla_grad": partial(attention_gradient, empty=True),
    "valid/empty/paged/sparse_flash_mla": partial(attention, paged=True, empty=True),
}
