"""Valid calls of fused_infer_attention_score."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from ascend_attn_check.samples import fused_infer_attention_score
from ascend_attn_check.samples.fused_infer_attention_score import CASES as SAMPLES
from ascend_attn_check.samples.fused_infer_attention_score import InferCase
from support.samples import Sample

from . import draw
from .calls import check, run
from .case import Case
from .memory import with_expanded
from .valid_dense import head_counts, sizes, valid_lengths
from .valid_infinities import SOURCES, but_value, case_of

LAYOUTS = sorted({case.layout for case in SAMPLES})


FuzzedInfer = draw.seeded(InferCase)


def infer_case(random: Random) -> FuzzedInfer:
    layout, s = random.choice(LAYOUTS), sizes(random)
    if random.random() < 0.3:
        s = 1, s[1]
    batches, packed = random.choice((0, 1, 1, 2, 2, 3)), "T" in layout.partition("_")[0]
    fields: dict[str, Any] = {
        "seed": random.getrandbits(32), "layout": layout, "b": batches, "s": s,
        "heads": head_counts(random), "d": draw.head_size(random),
        "mask_dtype": random.choice((torch.bool, torch.uint8, torch.int8)),
        "mode": random.choice((0, 2, 3, 4) if packed else (0, 0, 1, 2, 3, 4)),
        "sink": random.choice(("", "", "float32", "query")), "lse": random.random() < 0.6,
    }  # fmt: skip
    if random.random() < 0.3:
        fields["dv"] = draw.head_size(random)
    if random.random() < 0.3:
        fields["rope"] = draw.head_size(random, 20)
    if random.random() < 0.5:
        fields["pages"] = random.choice(("rows", "heads", "fractals"))
        fields["block_size"] = random.choice((16, 32, 48, 128))
    if fields.get("pages") == "fractals":
        of_keys = ("query",) if "rope" in fields else ("channel", "token")
        fields["quant"] = random.choice(("", *of_keys))
    if fields.get("quant") == "query":
        fields.pop("dv", None)
    if fields.get("pages") == "fractals":
        for name in ("d", "dv", "rope"):
            if name in fields:
                int8 = fields.get("quant") and name != "rope"
                fields[name] = (32 if int8 else 16) * random.randint(1, 3)
    if packed:
        counts = tuple(random.randint(0, s[0]) for _ in range(batches))
        fields["lengths"] = counts, draw.lengths(random, batches, max(s[1], 2))
    elif fields.get("pages"):
        keys = tuple(random.randint(0, s[1]) for _ in range(batches))
        fields["lengths"] = valid_lengths(random, batches, s[0]), keys
    elif random.random() < 0.4:
        fields["lengths"] = tuple(valid_lengths(random, batches, most) for most in s)
    if not packed and (fields["mode"] == 1 or (fields["mode"] == 0 and random.random() < 0.7)):
        leading = ("S", "BS", "1S", "B1S", "11S")
        fields["mask"] = random.choice(leading)
        # Two axes of a single query have a row for each batch.
        if random.random() < 0.3 and not (fields["mask"] == "S" and s[0] == 1):
            fields["larger"] = random.randint(0, 5), random.randint(0, 20)
    if fields["mode"] in (0, 4) and random.random() < 0.7:
        fields["pre"], fields["next"] = (random.randint(0, 12) for _ in range(2))
    return FuzzedInfer(**fields)


def without_elements(random: Random) -> FuzzedInfer:
    """No sequence, or none that has queries or keys, beside whatever else may be given."""
    case = infer_case(random)
    if random.random() < 0.4:
        return replace(case, b=0, lengths=tuple(x and () for x in case.lengths))
    side = random.randrange(2)
    s = (0, case.s[1]) if side == 0 else (case.s[0], 0)
    lengths = tuple(
        x if x is None or i != side else (0,) * len(x) for i, x in enumerate(case.lengths)
    )
    return replace(case, s=s, lengths=lengths)


def call(random: Random, case: FuzzedInfer, dtype: torch.dtype) -> Sample:
    sample = fused_infer_attention_score.build(case, dtype)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def attention(random: Random, empty: bool = False) -> str:
    case = without_elements(random) if empty else infer_case(random)
    dtype = random.choice(draw.DTYPES)
    sample = call(random, case, dtype)
    sample = draw.scaled(sample, ("value_antiquant_scale" if case.quant else "value",), random)
    sample = with_expanded(sample, ("query", "key", "value"), random)
    check(sample, run(sample, random, same_on_all_threads=True))
    return draw.label(case, dtype)


CASES: dict[str, Case] = {
    "valid/fused_infer_attention_score": attention,
    "valid/empty/fused_infer_attention_score": partial(attention, empty=True),
    "valid/infinities/fused_infer_attention_score": case_of(
        infer_case,
        fused_infer_attention_score.build,
        lambda x: ("query_rope" if x.rope else "query",) if x.quant else SOURCES,
        same_on_all_threads=but_value,
    ),
}
