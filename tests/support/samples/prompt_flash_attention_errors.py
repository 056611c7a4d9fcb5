"""Calls that prompt_flash_attention must refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops.check.samples.masks import compressed_mask
from ascend_attn_ops.check.samples.prompt_flash_attention import (
    PROMPT_FLASH_ATTENTION,
    PromptCase,
    quantization,
)
from ascend_attn_ops.check.samples.randomness import Random
from ascend_attn_ops.check.samples.sample import Sample, named_tensors

from .wrong_call import (
    Product,
    WrongCall,
    bools,
    elsewhere,
    inference_mask_rules,
    normal,
    put,
    wrong_inference,
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

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
SCALES = ("deq_scale1", "quant_scale1", "deq_scale2")
COMPRESSED = compressed_mask(3, torch.bool)


ONE = torch.tensor([1.0])
BITS = torch.tensor([0x3F800000], dtype=torch.uint64)  # 1.0


wrong = partial(wrong_inference, PROMPT_FLASH_ATTENTION)

RULES = [
    *(
        wrong(PLAIN, {"scale_value": x}, "scale_value", f"finite number of .*, got {words}")
        for x, words in [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (1e39, "1e.39")]
    ),
    # Layouts, dtypes, heads, sizes.
    wrong(PLAIN, {"layout": "SBH"}, "layout", "BSH, BSND, BNSD, BNSD_BSND, got 'SBH'"),
    wrong(PLAIN, {"query": normal(2, 6, 32)}, "query", "rank 4"),
    wrong(BSH, {"key": normal(2, 9, 2, 8)}, "key", "rank 3"),
    wrong(
        PLAIN,
        {"query": torch.ones(2, 4, 6, 8).int()},
        "query",
        "int8, float16, bfloat16",
        TypeError,
    ),
    wrong(PLAIN, {"key": normal(2, 2, 9, 8, dtype=torch.float16)}, "key", "bfloat16", TypeError),
    wrong(INT8, {"value": normal(2, 2, 9, 32, dtype=torch.float16)}, "value", "int8", TypeError),
    wrong(PLAIN, {"num_heads": 0}, "num_heads", "positive"),
    wrong(PLAIN, {"num_key_value_heads": -1}, "num_key_value_heads", "or 0"),
    wrong(PLAIN, {"num_key_value_heads": 3}, "num_key_value_heads", "divisor of num_heads"),
    wrong(
        BSH,
        {"query": normal(2, 6, 130), "num_heads": 130},
        "num_key_value_heads",
        "at most 64 query heads per key head",
    ),
    wrong(PLAIN, {"num_heads": 2}, "query", "num_heads = 2 heads"),
    wrong(PLAIN, {"num_key_value_heads": 4}, "key", "num_key_value_heads = 4 heads"),
    wrong(PLAIN, {"num_key_value_heads": 0}, "key", "num_key_value_heads = 4 heads"),
    wrong(BSND, {"value": normal(2, 9, 4, 8)}, "value", "num_key_value_heads = 2 heads"),
    wrong(BSH, {"query": normal(2, 6, 33)}, "query", "multiple of num_heads = 4"),
    wrong(BSH, {"key": normal(2, 9, 32)}, "key", r"num_key_value_heads \* D = 2 \* 8"),
    wrong(PLAIN, {"query": normal(2, 4, 6, 0)}, "query", "head size of at least 1"),
    wrong(BSH, {"query": normal(2, 6, 0)}, "query", "head size of at least 1"),
    wrong(PLAIN, {"key": normal(2, 2, 9, 4)}, "key", "query's D = 8"),
    wrong(PLAIN, {"value": normal(2, 2, 9, 4)}, "value", "query's D = 8"),
    wrong(PLAIN, {"key": normal(3, 2, 9, 8)}, "key", "batch size 2"),
    wrong(PLAIN, {"value": normal(2, 2, 8, 8)}, "value", "tokens as key, 9"),
    # Lengths.
    wrong(THREE, {LENGTHS[0]: [6, 2]}, LENGTHS[0], "one per batch, 3, got 2"),
    wrong(THREE, {LENGTHS[1]: [6, 2]}, LENGTHS[1], "one per batch, 3, got 2"),
    wrong(THREE, {LENGTHS[0]: [6, 2, 7]}, LENGTHS[0], r"0\.\.S = 6, got 7"),
    wrong(THREE, {LENGTHS[1]: [-1]}, LENGTHS[1], r"0\.\.S = 9, got -1"),
    # Masks and bands.
    *inference_mask_rules(wrong, PLAIN, MASKED, BAND),
    wrong(MASKED, {"next_tokens": -6}, "next_tokens", "-6, the queries of batch 0"),
    wrong(MASKED, {"pre_tokens": -9}, "pre_tokens", "-9, the keys of batch 0"),
    wrong(
        replace(MASKED, lengths=((6, 2), None)),
        {"next_tokens": -2},
        "next_tokens",
        "-2, the queries of batch 1",
    ),
    wrong(BAND, {"pre_tokens": 20, "next_tokens": -9}, "next_tokens", "the keys of batch 0"),
    wrong(BAND, {"pre_tokens": -6, "next_tokens": 20}, "pre_tokens", "the queries of batch"),
    # The quantisation table, row by row.
    *(wrong(INT8, {name: None}, name, "deq_scale2, got None.*161001") for name in SCALES),
    *(wrong(BOTH, {name: None}, name, "deq_scale2, got None.*161001") for name in SCALES),
    wrong(INT8, {"quant_offset2": ONE}, "quant_offset2", "without quant_scale2"),
    *(wrong(TO_INT8, {name: ONE}, name, "alone, got a tensor") for name in SCALES),
    *(wrong(EQUAL, {name: ONE}, name, "alone, got a tensor") for name in SCALES),
    wrong(EQUAL, {"quant_offset2": ONE}, "quant_offset2", "without quant_scale2"),
    wrong(INT8, {"scale_value": -65520.0}, "scale_value", "float16 can represent .*-65520"),
    # Dtypes and sizes of the scales.
    wrong(
        INT8, {"deq_scale1": ONE.long()}, "deq_scale1", "uint64 or float32, got int64", TypeError
    ),
    wrong(INT8, {"deq_scale1": BITS}, "deq_scale2", "uint64", TypeError),
    wrong(INT8, {"deq_scale2": BITS}, "deq_scale2", "float32", TypeError),
    wrong(INT8, {"quant_scale1": ONE.half()}, "quant_scale1", "float32", TypeError),
    wrong(INT8, {"deq_scale1": ONE.expand(2)}, "deq_scale1", "one value"),
    wrong(INT8, {"quant_scale1": ONE.expand(2)}, "quant_scale1", "one value"),
    wrong(INT8, {"deq_scale2": torch.ones(0)}, "deq_scale2", "one value"),
    wrong(
        BOTH, {"quant_scale2": ONE.bfloat16()}, "quant_scale2", "float32, got bfloat16", TypeError
    ),
    wrong(TO_INT8, {"quant_scale2": ONE.half()}, "quant_scale2", "float32 or bfloat16", TypeError),
    wrong(TO_INT8, {"quant_scale2": ONE.double()}, "quant_scale2", "float32 or bfloat", TypeError),
    wrong(TO_INT8, {"quant_scale2": ONE.expand(32)}, "quant_scale2", r"N \* D = 64"),
    wrong(
        replace(TO_INT8, d=16), {"quant_scale2": ONE.expand(32)}, "quant_scale2", "multiple of 32"
    ),
    wrong(OFFSET, {"quant_offset2": ONE.bfloat16()}, "quant_offset2", "float32", TypeError),
    wrong(OFFSET, {"quant_offset2": ONE.expand(64)}, "quant_offset2", "of quant_scale2"),
    wrong(OFFSET, {"quant_offset2": ONE[:0]}, "quant_offset2", "of quant_scale2"),
    # Interceptions: rows without keys, whose output would be 0 and not the offset.
    wrong(
        replace(OFFSET, mask="S"),
        {"next_tokens": -1},
        "quant_offset2",
        "sparse_mode 0 and next_tokens -1",
    ),
    wrong(
        replace(OFFSET, mask="S", s=(9, 6)),
        {"pre_tokens": 2},
        "quant_offset2",
        "sparse_mode 0, Sq = 9, Skv = 6 of batch 0",
    ),
    wrong(
        replace(OFFSET, mask="S", s=(9, 9), lengths=(None, (9, 6))),
        {"pre_tokens": 2},
        "quant_offset2",
        "Sq = 9, Skv = 6 of batch 1",
    ),
    wrong(
        replace(OFFSET, mode=3),
        {LENGTHS[1]: [9, 5]},
        "quant_offset2",
        "sparse_mode 3, Sq = 6, Skv = 5 of batch 1",
    ),
    wrong(
        replace(OFFSET, mode=4, pre=9, next=2),
        {LENGTHS[1]: [3, 9]},
        "quant_offset2",
        "sparse_mode 4, Sq = 6, Skv = 3 of batch 0",
    ),
    wrong(
        replace(TO_INT8, mode=4),
        {"pre_tokens": -1, "next_tokens": 3},
        "pre_tokens",
        "sparse_mode 4 with an int8 output",
    ),
    wrong(
        replace(TO_INT8, mode=4),
        {"pre_tokens": 3, "next_tokens": -1},
        "next_tokens",
        "sparse_mode 4 with an int8 output",
    ),
]


def devices() -> Iterator[WrongCall]:
    case = replace(BOTH, mask="S", offset=True)
    for name in ("key", "value", "atten_mask", *SCALES, "quant_scale2", "quant_offset2"):
        expected = r"expected device cpu \(query's\), got meta"
        yield wrong(case, put(name, elsewhere), name, expected, id=name, on_meta=False)


def values() -> Iterator[WrongCall]:
    """Yields wrong masks and scales, whose saturated outputs would look plausible."""
    for name, mask in {
        "inverted": COMPRESSED.logical_not(),
        "transposed": COMPRESSED.T.contiguous(),
        "zeros": torch.zeros_like(COMPRESSED),
    }.items():
        for leading in ((), (1,), (1, 1)):
            change = {"atten_mask": mask.view(*leading, 2048, 2048)}
            expected = r"got other values; True \(1\) masks"
            id = f"{name}-{leading}"
            yield wrong(BAND, change, "atten_mask", expected, id=id, on_meta=False)
    for name in (*SCALES, "quant_scale2", "quant_offset2"):
        case = OFFSET if name == "quant_offset2" else BOTH
        for number in (torch.nan, torch.inf, -torch.inf):
            change = {name: torch.tensor([number])}
            yield wrong(case, change, name, "finite", id=f"{name}-{number}", on_meta=False)
    # 1 and 127 converted, the bits of the smallest numbers, of infinity and of NaN.
    for bits in (0, 1, 127, 0x2000, 0x7F800000, 0x7FC00000, 1 << 32):
        for name in ("deq_scale1", "deq_scale2"):
            change = {name: torch.tensor([bits], dtype=torch.uint64)}
            expected = f"the bits of .*, got the integer {bits} "
            case = replace(INT8, deq_dtype=torch.uint64)
            yield wrong(case, change, name, expected, on_meta=False)


def gradients() -> Iterator[WrongCall]:
    """There are none: flash_attention_score has them."""
    for case, name in (
        *((EQUAL, name) for name in ("query", "key", "value")),
        (TO_INT8, "quant_scale2"),
    ):
        yield WrongCall(
            f"gradient of {name}", PROMPT_FLASH_ATTENTION, case,
            lambda sample, name=name: sample.requires_grad((name,)), name, NotImplementedError,
            "flash_attention_score",
        )  # fmt: skip


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
        product: Product,
        case: PromptCase,
        change: dict[str, Any] | None,
        argument: str,
        expected: str,
        exception: type[Exception] = ValueError,
        dtype: torch.dtype = torch.float16,
    ) -> WrongCall:
        if change is not None:
            tensors = {name: x.to("meta") for name, x in named_tensors(change).items()}
            change = {**change, **tensors}
        return WrongCall(
            f"{product}-{case.id}-{'-'.join(change or ())}-{expected}", WITHOUT_MEMORY, case,
            change, argument, exception, rf"^(?=.*Ascend {product}).*{expected}", limits=product,
            dtype=dtype,
        )  # fmt: skip

    yield from (
        wrong(
            "A2",
            PromptCase(b=65537, d=16),
            None,
            "query",
            "expected B .* 0..65536 on Ascend A2, got 65537",
        ),
        wrong("A2", PromptCase(b=129, d=15), None, "query", r"expected unaligned B .* 0\.\.128"),
        wrong("A2", PromptCase(heads=(257, 257), d=16), None, "query", r"expected N .* 1\.\.256"),
        wrong("A2", PromptCase(d=513), None, "query", r"expected D .* 1\.\.512"),
        wrong(
            "310P", PromptCase(b=129, d=16), None, "query", r"expected B .* 0\.\.128 on Ascend 310P"
        ),
        wrong("310P", PromptCase(heads=(257, 257)), None, "query", r"expected N .* 1\.\.256"),
        wrong("310P", PromptCase(s=(65536, 1)), None, "query", r"expected S .* 0\.\.65535"),
        wrong("310P", PromptCase(s=(1, 65536)), None, "key", r"expected S .* 0\.\.65535"),
        wrong("310P", PromptCase(d=513), None, "query", r"expected D .* 1\.\.512"),
        wrong(
            "310P",
            PromptCase(b=301, d=16, layout="BSH"),
            None,
            "query",
            r"expected B in BSH .* 0\.\.300 on Ascend 310P",
        ),
        wrong("310P", PromptCase(heads=(4, 2)), None, "num_key_value_heads", "expected 0 or num_"),
        wrong("310P", PromptCase(), {LENGTHS[0]: [3]}, LENGTHS[0], "expected None"),
        wrong("310P", PromptCase(), {LENGTHS[1]: [3]}, LENGTHS[1], "expected None"),
        wrong("310P", PromptCase(), {"quant_scale2": ONE}, "quant_scale2", "expected None"),
        wrong("310P", PromptCase(), {"next_tokens": 6}, "next_tokens", "expected 0, or at least"),
        wrong("310P", PromptCase(), {"pre_tokens": 4}, "pre_tokens", "expected at least Sq"),
        wrong(
            "310P",
            PromptCase(s=(128, 128)),
            {"atten_mask": bools(128, 128), "sparse_mode": 1},
            "sparse_mode",
            "expected 0",
        ),
        wrong(
            "310P",
            PromptCase(s=(128, 128)),
            {"atten_mask": bools(128, 128).byte()},
            "atten_mask",
            "expected dtype bool",
        ),
        wrong(
            "310P",
            PromptCase(s=(128, 256)),
            {"atten_mask": bools(128, 256)},
            "atten_mask",
            "expected None unless Sq = Skv",
        ),
        wrong(
            "310P",
            PromptCase(s=(100, 100)),
            {"atten_mask": bools(100, 100)},
            "atten_mask",
            "expected None unless Sq = Skv",
        ),
    )
    # Head sizes of int8 are aligned to 32.
    yield wrong("A2", PromptCase(b=129, d=16, inputs="int8"), None, "query", "unaligned B")
    for product, dtype in (("A2", torch.float32), ("A2", torch.float64), ("310P", torch.bfloat16)):
        expected = "expected dtype"
        yield wrong(product, PromptCase(), None, "query", expected, TypeError, dtype)
    int8 = PromptCase(inputs="int8")
    yield wrong("310P", int8, None, "query", "expected dtype", TypeError)
    yield from (
        wrong("950", int8, None, "query", "expected dtype", TypeError),
        wrong("950", PromptCase(b=65537, d=16), None, "query", r"expected B .* 0\.\.65536"),
        wrong("950", replace(PromptCase(), layout="BNSD_BSND"), None, "query", "multiple of 16"),
        wrong("950", replace(TO_INT8, layout="BNSD_BSND", d=16), None, "query", "multiple of 32"),
    )


WRONG_CALLS = [*RULES, *devices(), *values(), *gradients(), *limits()]
