"""Every rule of prompt_flash_attention has a call that violates it and nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import ascend_attn_ops
import pytest
import torch
from samples.masks import compressed_mask
from samples.prompt_flash_attention import PromptCase, build
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def bools(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


ONE = torch.tensor([1.0])
BITS = torch.tensor([0x3F800000], dtype=torch.uint64)  # 1.0

# A good case, what is changed, the exception, the argument named, and words of the message.
RULES: list[tuple[PromptCase, dict[str, Any], type[Exception], str, str]] = [
    *(
        (PLAIN, {"scale_value": x}, ValueError, "scale_value", f"finite number of .*, got {words}")
        for x, words in [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (1e39, "1e.39")]
    ),
    # Layouts, dtypes, heads, sizes.
    (PLAIN, {"layout": "SBH"}, ValueError, "layout", "BSH, BSND, BNSD, BNSD_BSND, got 'SBH'"),
    (PLAIN, {"query": normal(2, 6, 32)}, ValueError, "query", "rank 4"),
    (BSH, {"key": normal(2, 9, 2, 8)}, ValueError, "key", "rank 3"),
    (PLAIN, {"query": torch.ones(2, 4, 6, 8).int()}, TypeError, "query", "int8, float16, bfloat16"),
    (PLAIN, {"key": normal(2, 2, 9, 8, dtype=torch.float16)}, TypeError, "key", "bfloat16"),
    (INT8, {"value": normal(2, 2, 9, 32, dtype=torch.float16)}, TypeError, "value", "int8"),
    (PLAIN, {"num_heads": 0}, ValueError, "num_heads", "positive"),
    (PLAIN, {"num_key_value_heads": -1}, ValueError, "num_key_value_heads", "or 0"),
    (PLAIN, {"num_key_value_heads": 3}, ValueError, "num_key_value_heads", "divisor of num_heads"),
    (
        BSH,
        {"query": normal(2, 6, 130), "num_heads": 130},
        ValueError,
        "num_key_value_heads",
        "at most 64 query heads per key head",
    ),
    (PLAIN, {"num_heads": 2}, ValueError, "query", "num_heads = 2 heads"),
    (PLAIN, {"num_key_value_heads": 4}, ValueError, "key", "num_key_value_heads = 4 heads"),
    (PLAIN, {"num_key_value_heads": 0}, ValueError, "key", "num_key_value_heads = 4 heads"),
    (BSND, {"value": normal(2, 9, 4, 8)}, ValueError, "value", "num_key_value_heads = 2 heads"),
    (BSH, {"query": normal(2, 6, 33)}, ValueError, "query", "multiple of num_heads = 4"),
    (BSH, {"key": normal(2, 9, 32)}, ValueError, "key", r"num_key_value_heads \* D = 2 \* 8"),
    (PLAIN, {"query": normal(2, 4, 6, 0)}, ValueError, "query", "head size of at least 1"),
    (BSH, {"query": normal(2, 6, 0)}, ValueError, "query", "head size of at least 1"),
    (PLAIN, {"key": normal(2, 2, 9, 4)}, ValueError, "key", "query's D = 8"),
    (PLAIN, {"value": normal(2, 2, 9, 4)}, ValueError, "value", "query's D = 8"),
    (PLAIN, {"key": normal(3, 2, 9, 8)}, ValueError, "key", "batch size 2"),
    (PLAIN, {"value": normal(2, 2, 8, 8)}, ValueError, "value", "tokens as key, 9"),
    # Lengths.
    (THREE, {LENGTHS[0]: [6, 2]}, ValueError, LENGTHS[0], "one per batch, 3, got 2"),
    (THREE, {LENGTHS[1]: [6, 2]}, ValueError, LENGTHS[1], "one per batch, 3, got 2"),
    (THREE, {LENGTHS[0]: [6, 2, 7]}, ValueError, LENGTHS[0], r"0\.\.S = 6, got 7"),
    (THREE, {LENGTHS[1]: [-1]}, ValueError, LENGTHS[1], r"0\.\.S = 9, got -1"),
    # Masks and bands.
    (PLAIN, {"sparse_mode": 5}, ValueError, "sparse_mode", "expected 0, 1, 2 .*, 3 .* or 4"),
    (PLAIN, {"sparse_mode": -1}, ValueError, "sparse_mode", "got -1"),
    (PLAIN, {"sparse_mode": 1}, ValueError, "atten_mask", "full mask .* None.*161001"),
    (PLAIN, {"sparse_mode": 2}, ValueError, "atten_mask", "compressed mask .* None.*161001"),
    (PLAIN, {"sparse_mode": 3}, ValueError, "atten_mask", "compressed mask .* None.*161001"),
    (PLAIN, {"sparse_mode": 4}, ValueError, "atten_mask", "compressed mask .* None.*161001"),
    (MASKED, {"atten_mask": torch.zeros(6, 9)}, TypeError, "atten_mask", "bool, int8 or uint8"),
    (MASKED, {"atten_mask": bools(6, 8)}, ValueError, "atten_mask", "or with more rows"),
    (MASKED, {"atten_mask": bools(5, 9)}, ValueError, "atten_mask", "or with more rows"),
    (MASKED, {"atten_mask": bools(9)}, ValueError, "atten_mask", r"expected shape \(Sq, Skv\)"),
    (MASKED, {"atten_mask": bools(3, 6, 9)}, ValueError, "atten_mask", r"\(1, Sq, Skv\)"),
    (MASKED, {"atten_mask": bools(3, 1, 6, 9)}, ValueError, "atten_mask", r"\(B, 1, Sq, Skv\)"),
    (MASKED, {"atten_mask": bools(2, 2, 6, 9)}, ValueError, "atten_mask", r"\(1, 1, Sq, Skv\)"),
    (MASKED, {"atten_mask": bools(1, 1, 1, 6, 9)}, ValueError, "atten_mask", r"\(Sq, Skv\)"),
    (BAND, {"atten_mask": bools(6, 9)}, ValueError, "atten_mask", r"\(2048, 2048\)"),
    (BAND, {"atten_mask": COMPRESSED.expand(2, -1, -1)}, ValueError, "atten_mask", "1, 2048, 2048"),
    (MASKED, {"pre_tokens": -1, "next_tokens": -1}, ValueError, "pre_tokens", "not both negative"),
    (MASKED, {"pre_tokens": 2, "next_tokens": -3}, ValueError, "next_tokens", "keeps keys"),
    (MASKED, {"pre_tokens": -3, "next_tokens": 2}, ValueError, "pre_tokens", "keeps keys"),
    (MASKED, {"next_tokens": -6}, ValueError, "next_tokens", "-6, the queries of batch 0"),
    (MASKED, {"pre_tokens": -9}, ValueError, "pre_tokens", "-9, the keys of batch 0"),
    (
        replace(MASKED, lengths=((6, 2), None)),
        {"next_tokens": -2},
        ValueError,
        "next_tokens",
        "-2, the queries of batch 1",
    ),
    (BAND, {"pre_tokens": -4, "next_tokens": -4}, ValueError, "pre_tokens", "not both negative"),
    (BAND, {"pre_tokens": 4, "next_tokens": -5}, ValueError, "next_tokens", "keeps keys"),
    (BAND, {"pre_tokens": 20, "next_tokens": -9}, ValueError, "next_tokens", "the keys of batch 0"),
    (BAND, {"pre_tokens": -6, "next_tokens": 20}, ValueError, "pre_tokens", "the queries of batch"),
    # The quantisation table, row by row.
    *((INT8, {name: None}, ValueError, name, "deq_scale2, got None.*161001") for name in SCALES),
    *((BOTH, {name: None}, ValueError, name, "deq_scale2, got None.*161001") for name in SCALES),
    (INT8, {"quant_offset2": ONE}, ValueError, "quant_offset2", "without quant_scale2"),
    *((TO_INT8, {name: ONE}, ValueError, name, "alone, got a tensor") for name in SCALES),
    *((EQUAL, {name: ONE}, ValueError, name, "alone, got a tensor") for name in SCALES),
    (EQUAL, {"quant_offset2": ONE}, ValueError, "quant_offset2", "without quant_scale2"),
    (INT8, {"scale_value": -65520.0}, ValueError, "scale_value", "float16 can represent .*-65520"),
    # Dtypes and sizes of the scales.
    (INT8, {"deq_scale1": ONE.long()}, TypeError, "deq_scale1", "uint64 or float32, got int64"),
    (INT8, {"deq_scale1": BITS}, TypeError, "deq_scale2", "uint64"),
    (INT8, {"deq_scale2": BITS}, TypeError, "deq_scale2", "float32"),
    (INT8, {"quant_scale1": ONE.half()}, TypeError, "quant_scale1", "float32"),
    (INT8, {"deq_scale1": ONE.expand(2)}, ValueError, "deq_scale1", "one value"),
    (INT8, {"quant_scale1": ONE.expand(2)}, ValueError, "quant_scale1", "one value"),
    (INT8, {"deq_scale2": torch.ones(0)}, ValueError, "deq_scale2", "one value"),
    (BOTH, {"quant_scale2": ONE.bfloat16()}, TypeError, "quant_scale2", "float32, got bfloat16"),
    (TO_INT8, {"quant_scale2": ONE.half()}, TypeError, "quant_scale2", "float32 or bfloat16"),
    (TO_INT8, {"quant_scale2": ONE.expand(32)}, ValueError, "quant_scale2", r"N \* D = 64"),
    (
        replace(TO_INT8, d=16),
        {"quant_scale2": ONE.expand(32)},
        ValueError,
        "quant_scale2",
        "multiple of 32",
    ),
    (OFFSET, {"quant_offset2": ONE.bfloat16()}, TypeError, "quant_offset2", "float32"),
    (OFFSET, {"quant_offset2": ONE.expand(64)}, ValueError, "quant_offset2", "of quant_scale2"),
    (OFFSET, {"quant_offset2": ONE[:0]}, ValueError, "quant_offset2", "of quant_scale2"),
    # Interceptions: rows without keys, whose output would be 0 and not the offset.
    (
        replace(OFFSET, mask="S"),
        {"next_tokens": -1},
        ValueError,
        "quant_offset2",
        "sparse_mode 0 and next_tokens -1",
    ),
    (
        replace(OFFSET, mask="S", s=(9, 6)),
        {"pre_tokens": 2},
        ValueError,
        "quant_offset2",
        "sparse_mode 0, Sq = 9, Skv = 6 of batch 0",
    ),
    (
        replace(OFFSET, mask="S", s=(9, 9), lengths=(None, (9, 6))),
        {"pre_tokens": 2},
        ValueError,
        "quant_offset2",
        "Sq = 9, Skv = 6 of batch 1",
    ),
    (
        replace(OFFSET, mode=3),
        {LENGTHS[1]: [9, 5]},
        ValueError,
        "quant_offset2",
        "sparse_mode 3, Sq = 6, Skv = 5 of batch 1",
    ),
    (
        replace(OFFSET, mode=4, pre=9, next=2),
        {LENGTHS[1]: [3, 9]},
        ValueError,
        "quant_offset2",
        "sparse_mode 4, Sq = 6, Skv = 3 of batch 0",
    ),
    (
        replace(TO_INT8, mode=4),
        {"pre_tokens": -1, "next_tokens": 3},
        ValueError,
        "pre_tokens",
        "sparse_mode 4 with an int8 output",
    ),
    (
        replace(TO_INT8, mode=4),
        {"pre_tokens": 3, "next_tokens": -1},
        ValueError,
        "next_tokens",
        "sparse_mode 4 with an int8 output",
    ),
]

each_rule = pytest.mark.parametrize(
    ("case", "changes", "exception", "argument", "words"),
    RULES,
    ids=[f"{c.id}-{'-'.join(changes)}-{words}" for c, changes, _, _, words in RULES],
)


def call(case: PromptCase, changes: dict[str, Any], wrap: Any = lambda x: x) -> Any:
    sample = build(case, torch.bfloat16)
    arguments = {**sample.arguments, **changes}
    arguments = {n: wrap(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    inputs = [arguments.pop(name) for name in sample.inputs]
    return torch.ops.ascend.prompt_flash_attention(*inputs, **arguments)


@each_rule
@pytest.mark.usefixtures("no_limits")
def test_rules(
    case: PromptCase,
    changes: dict[str, Any],
    exception: type[Exception],
    argument: str,
    words: str,
) -> None:
    with pytest.raises(exception, match=words) as error:
        call(case, changes)
    form = (
        rf"ascend::prompt_flash_attention: {argument}: expected .+, got .+ "
        r"\[ACLNN_ERR_PARAM_\w+ 16100\d\]"
    )
    assert re.fullmatch(form, str(error.value)), error.value
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(exception, match=f"{argument}: .*{words}"),
    ):
        call(case, changes, mode.from_tensor)


@pytest.mark.parametrize("case", list(dict.fromkeys(c for c, *_ in RULES)), ids=lambda c: c.id)
@pytest.mark.usefixtures("no_limits")
def test_the_unchanged_calls_are_good(case: PromptCase) -> None:
    """Or else the table would prove nothing."""
    call(case, {})


@pytest.mark.parametrize(
    "argument", ["key", "value", "atten_mask", *SCALES, "quant_scale2", "quant_offset2"]
)
@pytest.mark.usefixtures("no_limits")
def test_devices(argument: str) -> None:
    case = replace(BOTH, mask="S", offset=True)
    elsewhere = build(case, torch.bfloat16).arguments[argument].to("meta")
    with pytest.raises(ValueError, match=rf"{argument}: expected device cpu \(query's\), got meta"):
        call(case, {argument: elsewhere})


# What looks like a violation and is none.
LEGAL = [
    (PLAIN, {"pre_tokens": -3, "next_tokens": -3}),  # without a mask they do not count
    (CAUSAL, {"pre_tokens": -3, "next_tokens": -3}),
    (THREE, {LENGTHS[0]: [6, 2, 0, 77]}),
    (replace(MASKED, lengths=((6, 0), None)), {"next_tokens": -5}),  # nothing to skip in batch 1
    (replace(OFFSET, s=(9, 6)), {"pre_tokens": 2, "next_tokens": -1}),  # no mask, no band
    (replace(OFFSET, s=(9, 6), mode=2), {}),
    (replace(TO_INT8, s=(9, 6), mode=3), {}),  # rows without keys, and no offset
]


@pytest.mark.parametrize(("case", "changes"), LEGAL, ids=str)
@pytest.mark.usefixtures("no_limits")
def test_legal(case: PromptCase, changes: dict[str, Any]) -> None:
    call(case, changes)


@pytest.mark.parametrize(
    "mask",
    [COMPRESSED.logical_not(), COMPRESSED.T.contiguous(), torch.zeros_like(COMPRESSED)],
    ids=["inverted", "transposed", "zeros"],
)
@pytest.mark.parametrize("leading", [(), (1,), (1, 1)], ids=str)
def test_content_of_compressed_masks(mask: Tensor, leading: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"atten_mask: .* got other values; True \(1\) masks"):
        call(BAND, {"atten_mask": mask.view(*leading, 2048, 2048)})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("argument", [*SCALES, "quant_scale2", "quant_offset2"])
@pytest.mark.usefixtures("no_limits")
def test_scales_that_are_no_numbers(argument: str, bad: float) -> None:
    """Their saturated outputs would look plausible."""
    case = OFFSET if argument == "quant_offset2" else BOTH
    with pytest.raises(ValueError, match=rf"{argument}: expected .*finite .*\[ACLNN_ERR"):
        call(case, {argument: torch.tensor([bad])})


# 1 and 127 converted, the bits of the smallest numbers, of infinity and of NaN.
@pytest.mark.parametrize("bits", [0, 1, 127, 0x2000, 0x7F800000, 0x7FC00000, 1 << 32])
@pytest.mark.parametrize("argument", ["deq_scale1", "deq_scale2"])
@pytest.mark.usefixtures("no_limits")
def test_integers_that_are_no_scale(argument: str, bits: int) -> None:
    scales = {"deq_scale1": BITS, "deq_scale2": BITS}
    call(INT8, scales)
    with pytest.raises(ValueError, match=f"{argument}: .* the bits of .*, got the integer {bits} "):
        call(INT8, {**scales, argument: torch.tensor([bits], dtype=torch.uint64)})


@pytest.mark.parametrize("operator", ["prompt_flash_attention", "flash_attention_score"])
def test_a_query_without_axes(operator: str) -> None:
    x = torch.tensor(1.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"ascend::{operator}: query: expected rank 4"):
        getattr(ascend_attn_ops, operator)(x, x, x, num_heads=1, layout="BNSD")


@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_no_gradient(argument: str) -> None:
    sample = build(EQUAL, torch.bfloat16).requires_grad((argument,))
    with pytest.raises(NotImplementedError, match=f"{argument}: .* flash_attention_score"):
        sample.call(torch.ops.ascend)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            sample.call(torch.ops.ascend)


def test_no_gradient_of_a_scale() -> None:
    sample = build(TO_INT8, torch.bfloat16).requires_grad(("quant_scale2",))
    with pytest.raises(NotImplementedError, match=r"quant_scale2: .* flash_attention_score"):
        sample.call(torch.ops.ascend)


def zeros(case: PromptCase, dtype: torch.dtype = torch.float16, **changes: Any) -> None:
    """The call of a case, of tensors without memory."""
    query, key = (
        torch.zeros((), dtype=dtype).expand(case.shape(side)).to("meta") for side in (0, 1)
    )
    n, nk = case.heads
    options = {
        "num_heads": n,
        "layout": case.layout,
        "num_key_value_heads": 0 if n == nk else nk,
        **changes,
    }
    options = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()}
    torch.ops.ascend.prompt_flash_attention(query, key, key, **options)


LIMITS: list[tuple[str, PromptCase, dict[str, Any], str]] = [
    ("A2", PromptCase(b=65536, d=16), {}, ""),
    ("A2", PromptCase(b=65537, d=16), {}, "query: expected B .* 0..65536 on Ascend A2, got 65537"),
    ("A2", PromptCase(b=128, d=15), {}, ""),
    ("A2", PromptCase(b=129, d=15), {}, r"query: expected unaligned B .* 0\.\.128"),
    ("A2", PromptCase(heads=(256, 256), d=16), {}, ""),
    ("A2", PromptCase(heads=(257, 257), d=16), {}, r"query: expected N .* 1\.\.256"),
    ("A2", PromptCase(s=(20971520, 20971520), d=16), {}, ""),
    ("A2", PromptCase(s=(20971521, 1), d=16), {}, r"query: expected S .* 0\.\.20971520"),
    ("A2", PromptCase(s=(1, 20971521), d=16), {}, r"key: expected S .* 0\.\.20971520"),
    ("A2", PromptCase(d=512), {}, ""),
    ("A2", PromptCase(d=513), {}, r"query: expected D .* 1\.\.512"),
    ("A2", PromptCase(layout="BSH", heads=(217, 217), d=302), {}, ""),  # 65534
    ("A2", PromptCase(layout="BSH", heads=(255, 255), d=257), {}, r"N\*D .* got 65535"),
    ("A2", PromptCase(layout="BSND", heads=(128, 128), d=512), {}, r"query: expected N\*D"),
    ("A2", PromptCase(layout="BNSD", heads=(128, 128), d=512), {}, ""),
    ("310P", PromptCase(d=17), {}, ""),
    ("310P", PromptCase(b=128, heads=(256, 256), d=512, s=(65535, 3)), {}, ""),
    ("310P", PromptCase(layout="BSH", heads=(128, 128), d=512), {}, ""),
    ("310P", PromptCase(b=129, d=16), {}, r"query: expected B .* 0\.\.128 on Ascend 310P"),
    ("310P", PromptCase(heads=(257, 257)), {}, r"query: expected N .* 1\.\.256"),
    ("310P", PromptCase(s=(65536, 1)), {}, r"query: expected S .* 0\.\.65535"),
    ("310P", PromptCase(s=(1, 65536)), {}, r"key: expected S .* 0\.\.65535"),
    ("310P", PromptCase(d=513), {}, r"query: expected D .* 1\.\.512"),
    ("310P", PromptCase(heads=(4, 2)), {}, "num_key_value_heads: expected 0"),
    ("310P", PromptCase(), {LENGTHS[0]: [3]}, f"{LENGTHS[0]}: expected None"),
    ("310P", PromptCase(), {LENGTHS[1]: [3]}, f"{LENGTHS[1]}: expected None"),
    ("310P", PromptCase(), {LENGTHS[1]: []}, ""),
    ("310P", PromptCase(), {"quant_scale2": ONE}, "quant_scale2: expected None"),
    ("310P", PromptCase(), {"next_tokens": 2147483647}, ""),
    ("310P", PromptCase(), {"next_tokens": 7}, "next_tokens: expected 0 or 2147483647"),
    ("310P", PromptCase(), {"pre_tokens": 7}, "pre_tokens: expected 2147483647"),
    ("310P", PromptCase(s=(128, 128)), {"atten_mask": bools(128, 128)}, ""),
    (
        "310P",
        PromptCase(s=(128, 128)),
        {"atten_mask": bools(128, 128), "sparse_mode": 1},
        "sparse_mode: expected 0",
    ),
    (
        "310P",
        PromptCase(s=(128, 128)),
        {"atten_mask": bools(128, 128).byte()},
        "atten_mask: expected dtype bool",
    ),
    (
        "310P",
        PromptCase(s=(128, 256)),
        {"atten_mask": bools(128, 256)},
        "atten_mask: expected None unless Sq = Skv",
    ),
    (
        "310P",
        PromptCase(s=(100, 100)),
        {"atten_mask": bools(100, 100)},
        "atten_mask: expected None unless Sq = Skv",
    ),
]


@pytest.mark.parametrize(
    ("product", "case", "changes", "message"),
    LIMITS,
    ids=[f"{p}-{c.id}-{'-'.join(x)}-{'bad' if m else 'good'}" for p, c, x, m in LIMITS],
)
def test_limits(product: Any, case: PromptCase, changes: dict[str, Any], message: str) -> None:
    with ascend_attn_ops.limits(product):
        if not message:
            zeros(case, **changes)
            return
        with pytest.raises(ValueError, match=message) as error:
            zeros(case, **changes)
    assert f"on Ascend {product}" in str(error.value)


def test_limits_of_int8() -> None:
    """Its head sizes are aligned to 32."""
    scales = {"deq_scale1": ONE, "quant_scale1": ONE, "deq_scale2": ONE}
    zeros(PromptCase(b=129, d=32), torch.int8, **scales)
    with pytest.raises(ValueError, match="unaligned B"):
        zeros(PromptCase(b=129, d=16), torch.int8, **scales)


@pytest.mark.parametrize(
    ("product", "dtypes"),
    [("A2", [torch.float32, torch.float64]), ("310P", [torch.bfloat16, torch.int8])],
)
def test_dtypes_of_products(product: Any, dtypes: list[torch.dtype]) -> None:
    with ascend_attn_ops.limits(product):
        zeros(PromptCase())
        for dtype in dtypes:
            with pytest.raises(TypeError, match=rf"query: expected dtype .* on Ascend {product}"):
                zeros(PromptCase(), dtype)


@pytest.mark.parametrize("product", ["A3", "950"])
def test_products_without_the_function(product: Any) -> None:
    with (
        ascend_attn_ops.limits(product),
        pytest.raises(NotImplementedError, match=r"product.* aclnnPromptFlashAttentionV2"),
    ):
        zeros(PromptCase())
