"""Calls that prompt_flash_attention must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_check.samples.prompt_flash_attention import (
    PROMPT_FLASH_ATTENTION,
    PromptCase,
    quantization,
)
from ascend_attn_check.samples.randomness import Random
from ascend_attn_ops.reference.call import Sample, named_tensors

from .wrong_call import (
    LENGTHS,
    WrongCall,
    bools,
    device_rules,
    gradient_rules,
    inference_rules,
    normal,
    wrong_call,
)

PLAIN = PromptCase(s=(6, 9), heads=(4, 2), d=8)
BSH = replace(PLAIN, layout="BSH")
BSND = replace(PLAIN, layout="BSND")
EQUAL = PromptCase(s=(6, 9), heads=(2, 2), d=8)
MASKED = replace(EQUAL, mask="S")
BAND = replace(EQUAL, mode=4, pre=3, next=2)
CAUSAL = replace(EQUAL, mode=3)
THREE = replace(EQUAL, b=3, lengths=((6, 2, 0), (9, 4, 9)))
INT8 = PromptCase(s=(6, 9), heads=(2, 2), d=32, inputs="int8")
BOTH = replace(INT8, output="int8")
TO_INT8 = PromptCase(s=(6, 9), heads=(2, 2), d=32, output="int8")
OFFSET = replace(TO_INT8, offset=True)

SCALES = ("deq_scale1", "quant_scale1", "deq_scale2")
ONE = torch.tensor([1.0])
BITS = torch.tensor([0x3F800000], dtype=torch.uint64)  # 1.0

wrong = partial(wrong_call, PROMPT_FLASH_ATTENTION)
wrong_type = partial(wrong, exception=TypeError)

RULES = [
    *inference_rules(wrong, PLAIN, THREE, MASKED, BAND),
    # Layouts, dtypes, heads, sizes.
    wrong(PLAIN, "BSH, BSND, BNSD, BNSD_BSND, got 'SBH'", layout="SBH"),
    wrong_type(PLAIN, "int8, float16, bfloat16", query=torch.ones(2, 4, 6, 8).int()),
    wrong_type(INT8, "int8", value=normal(2, 2, 9, 32, dtype=torch.float16)),
    wrong(BSH, "num_key_value_heads: at most 64 query heads per key head", query=normal(2, 6, 130),
          num_heads=130),
    wrong(BSND, "num_key_value_heads = 2 on axis 2", value=normal(2, 9, 4, 8)),
    wrong(BSH, "key: query's D = 8, got 16", key=normal(2, 9, 32)),
    wrong(BSH, "head size of at least 1", query=normal(2, 6, 0)),
    wrong(PLAIN, "query's D = 8", key=normal(2, 2, 9, 4)),
    wrong(PLAIN, "query's D = 8", value=normal(2, 2, 9, 4)),
    wrong(PLAIN, "batch size 2", key=normal(3, 2, 9, 8)),
    wrong(PLAIN, "tokens as key, 9", value=normal(2, 2, 8, 8)),
    wrong(MASKED, "-6, the queries of batch 0", next_tokens=-6),
    wrong(MASKED, "-9, the keys of batch 0", pre_tokens=-9),
    wrong(replace(MASKED, lengths=((6, 2), None)), "-2, the queries of batch 1", next_tokens=-2,
          on_meta=False),
    wrong(BAND, "next_tokens: the keys of batch 0", pre_tokens=20, next_tokens=-9),
    wrong(BAND, "the queries of batch", pre_tokens=-6, next_tokens=20),
    # The quantisation table, row by row.
    *(wrong(INT8, "deq_scale2, got None.*161001", **{name: None}) for name in SCALES),
    *(wrong(BOTH, "deq_scale2, got None.*161001", **{name: None}) for name in SCALES),
    wrong(INT8, "without quant_scale2", quant_offset2=ONE),
    *(wrong(TO_INT8, "alone, got a tensor", **{name: ONE}) for name in SCALES),
    *(wrong(EQUAL, "alone, got a tensor", **{name: ONE}) for name in SCALES),
    wrong(EQUAL, "without quant_scale2", quant_offset2=ONE),
    wrong(INT8, "float16 can represent .*-65520", scale_value=-65520.0),
    # Dtypes and sizes of the scales.
    wrong_type(INT8, "uint64 or float32, got int64", deq_scale1=ONE.long()),
    wrong_type(INT8, "deq_scale2: uint64", deq_scale1=BITS),
    wrong_type(INT8, "float32", deq_scale2=BITS),
    wrong_type(INT8, "float32", quant_scale1=ONE.half()),
    wrong(INT8, "one value", deq_scale1=ONE.expand(2)),
    wrong(INT8, "one value", quant_scale1=ONE.expand(2)),
    wrong(INT8, "one value", deq_scale2=torch.ones(0)),
    wrong_type(BOTH, "float32, got bfloat16", quant_scale2=ONE.bfloat16()),
    wrong_type(TO_INT8, "float32 or bfloat16", quant_scale2=ONE.half()),
    wrong_type(TO_INT8, "float32 or bfloat", quant_scale2=ONE.double()),
    wrong(TO_INT8, r"N \* D = 64", quant_scale2=ONE.expand(32)),
    wrong(replace(TO_INT8, d=16), "multiple of 32", quant_scale2=ONE.expand(32)),
    wrong_type(OFFSET, "float32", quant_offset2=ONE.bfloat16()),
    wrong(OFFSET, "of quant_scale2", quant_offset2=ONE.expand(64)),
    wrong(OFFSET, "of quant_scale2", quant_offset2=ONE[:0]),
    # Interceptions: rows without keys, whose output would be 0 and not the offset.
    wrong(replace(OFFSET, mask="S"), "quant_offset2: sparse_mode 0 and next_tokens -1",
          next_tokens=-1),
    wrong(replace(OFFSET, mask="S", s=(9, 6)),
          "quant_offset2: sparse_mode 0, Sq = 9, Skv = 6 of batch 0", pre_tokens=2),
    wrong(replace(OFFSET, mask="S", s=(9, 9), lengths=(None, (9, 6))),
          "quant_offset2: Sq = 9, Skv = 6 of batch 1", pre_tokens=2, on_meta=False),
    wrong(replace(OFFSET, mode=3), "quant_offset2: sparse_mode 3, Sq = 6, Skv = 5 of batch 1",
          on_meta=False, **{LENGTHS[1]: [9, 5]}),
    wrong(replace(OFFSET, mode=4, pre=9, next=2), on_meta=False,
          expected="quant_offset2: sparse_mode 4, Sq = 6, Skv = 3 of batch 0",
          **{LENGTHS[1]: [3, 9]}),
    wrong(replace(TO_INT8, mode=4), "sparse_mode 4 with an int8 output", pre_tokens=-1,
          next_tokens=3),
    wrong(replace(TO_INT8, mode=4), "next_tokens: sparse_mode 4 with an int8 output", pre_tokens=3,
          next_tokens=-1),
]  # fmt: skip


def value_rules() -> Iterator[WrongCall]:
    """Yields wrong scales, whose saturated outputs would look plausible."""
    for name in (*SCALES, "quant_scale2", "quant_offset2"):
        case = OFFSET if name == "quant_offset2" else BOTH
        for number in (torch.nan, torch.inf, -torch.inf):
            change = {name: torch.tensor([number])}
            yield wrong(case, "finite", id=f"{name}-{number}", on_meta=False, **change)
    # 1 and 127 converted, the bits of the smallest numbers, of infinity and of NaN.
    case = replace(INT8, deq_dtype=torch.uint64)
    for bits in (0, 1, 127, 0x2000, 0x7F800000, 0x7FC00000, 1 << 32):
        for name in ("deq_scale1", "deq_scale2"):
            change = {name: torch.tensor([bits], dtype=torch.uint64)}
            expected = f"the bits of .*, got the integer {bits} "
            yield wrong(case, expected, on_meta=False, **change)


def zeros(case: PromptCase, dtype: torch.dtype) -> Sample:
    """The call of a case, of tensors without memory; a full mask is not among them."""
    dtype = torch.int8 if case.inputs == "int8" else dtype
    query, key = (
        torch.zeros((), dtype=dtype).expand(case.shape(side)).to("meta") for side in (0, 1)
    )
    n, nk = case.heads
    options = {
        "num_heads": n,
        "scale_value": 1.0,
        "layout": case.layout,
        "num_key_value_heads": 0 if n == nk else nk,
        **quantization(case, dtype, Random(case.id, dtype)),
    }
    inputs = {"query": query, "key": key, "value": key}
    return Sample(PROMPT_FLASH_ATTENTION.name, case.id, inputs, options).to("meta")


WITHOUT_MEMORY = replace(PROMPT_FLASH_ATTENTION, build=zeros)


def limits() -> Iterator[WrongCall]:
    def wrong(
        product: str, case: PromptCase, expected: str, *args: Any, **change: Any
    ) -> WrongCall:
        tensors = {name: x.to("meta") for name, x in named_tensors(change).items()}
        given = {"dtype": torch.float16, "limits": product, **change, **tensors}
        return wrong_call(WITHOUT_MEMORY, case, expected, *args, **given)

    square, bsnd = PromptCase(s=(128, 128)), PromptCase(layout="BNSD_BSND")
    int8 = PromptCase(inputs="int8")
    yield from (
        wrong("A2", PromptCase(b=65537, d=16), "query: expected B .* 0..65536 .*, got 65537"),
        wrong("A2", PromptCase(b=129, d=15), r"query: expected unaligned B .* 0\.\.128"),
        # Head sizes of int8 are aligned to 32.
        wrong("A2", PromptCase(b=129, d=16, inputs="int8"), "query: unaligned B"),
        wrong("A2", PromptCase(heads=(257, 257), d=16), r"query: expected N .* 1\.\.256"),
        wrong("A2", PromptCase(d=513), r"query: expected D .* 1\.\.512"),
        wrong("310P", PromptCase(b=129, d=16), r"query: expected B .* 0\.\.128"),
        wrong("310P", PromptCase(heads=(257, 257)), r"query: expected N .* 1\.\.256"),
        wrong("310P", PromptCase(s=(65536, 1)), r"query: expected S .* 0\.\.65535"),
        wrong("310P", PromptCase(s=(1, 65536)), r"key: expected S .* 0\.\.65535"),
        wrong("310P", PromptCase(d=513), r"query: expected D .* 1\.\.512"),
        wrong("310P", PromptCase(b=301, d=16, layout="BSH"), r"query: expected B in BSH .*\.\.300"),
        wrong("310P", PromptCase(heads=(4, 2)), "num_key_value_heads: expected 0 or num_"),
        wrong("310P", PromptCase(), "expected None", **{LENGTHS[0]: [3]}),
        wrong("310P", PromptCase(), "expected None", **{LENGTHS[1]: [3]}),
        wrong("310P", PromptCase(), "expected None", quant_scale2=ONE),
        wrong("310P", PromptCase(), "expected 0, or at least", next_tokens=6),
        wrong("310P", PromptCase(), "expected at least Sq", pre_tokens=4),
        wrong("310P", square, "expected 0", sparse_mode=1, atten_mask=bools(128, 128)),
        wrong("310P", square, "expected dtype bool", atten_mask=bools(128, 128).byte()),
        wrong("310P", PromptCase(s=(128, 256)), "expected None unless Sq = Skv",
              atten_mask=bools(128, 256)),
        wrong("310P", PromptCase(s=(100, 100)), "expected None unless Sq = Skv",
              atten_mask=bools(100, 100)),
        wrong("310P", int8, "query: expected dtype", TypeError),
        wrong("950", int8, "query: expected dtype", TypeError),
        wrong("950", PromptCase(b=65537, d=16), r"query: expected B .* 0\.\.65536"),
        wrong("950", bsnd, "query: multiple of 16"),
        wrong("950", replace(TO_INT8, layout="BNSD_BSND", d=16), "query: multiple of 32"),
    )  # fmt: skip
    for product, dtype in (("A2", torch.float32), ("A2", torch.float64), ("310P", torch.bfloat16)):
        yield wrong(product, PromptCase(), "query: expected dtype", TypeError, dtype=dtype)


TENSORS = ("key", "value", "atten_mask", *SCALES, "quant_scale2", "quant_offset2")
DIFFERENTIABLE = ((EQUAL, "query"), (EQUAL, "key"), (EQUAL, "value"), (TO_INT8, "quant_scale2"))
WRONG_CALLS = [
    *RULES, *device_rules(wrong, replace(BOTH, mask="S", offset=True), TENSORS),
    *gradient_rules(wrong, DIFFERENTIABLE), *value_rules(), *limits(),
]  # fmt: skip
