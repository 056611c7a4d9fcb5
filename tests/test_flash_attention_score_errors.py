"""Every rule of flash_attention_score has a call that violates it and nothing else."""

from __future__ import annotations

import re
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import flash_attention_score
from samples.flash_attention_score import FlashCase, build, build_grad
from samples.masks import compressed_mask
from torch._subclasses.fake_tensor import FakeTensorMode

PLAIN = FlashCase(s=(6, 9), heads=(4, 2), d=(8, 8))
BSH = FlashCase(layout="BSH", s=(6, 9), heads=(4, 2), d=(8, 8))
TND = FlashCase(layout="TND", lengths=((3, 4), (5, 6)), tail=(1, 2), heads=(2, 2), d=(8, 8))
MASKED = FlashCase(s=(6, 9), mode=0, mask="", heads=(2, 2), d=(8, 8))
BAND = FlashCase(s=(6, 9), mode=4, pre=3, next=2, heads=(2, 2), d=(8, 8))
PREFIX = FlashCase(s=(6, 9), mode=6, prefix=(4, 5), heads=(2, 2), d=(8, 8))
FULL_PREFIX = FlashCase(s=(6, 9), mode=5, prefix=(4, 5), heads=(2, 2), d=(8, 8))
PSE = FlashCase(s=(6, 9), pse="full", heads=(2, 2), d=(8, 8))
LONG_PREFIX = FlashCase(s=(9, 6), mode=6, prefix=(4, 5), heads=(2, 2), d=(8, 8))
SLOPES = FlashCase(s=(6, 6), pse="N", pse_type=2, heads=(2, 2), d=(8, 8))
DROP = FlashCase(s=(6, 9), keep_prob=0.5, heads=(2, 2), d=(8, 8))


def bools(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


COMPRESSED = compressed_mask(3, torch.bool)
LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")

# A good case, what is changed, the exception, the argument named, and words of the message.
RULES: list[tuple[FlashCase, dict[str, Any], type[Exception], str, str]] = [
    (PLAIN, {"layout": "BNDS"}, ValueError, "layout", "BSH, SBH, BSND, BNSD, TND"),
    (PLAIN, {"query": normal(2, 6, 32)}, ValueError, "query", "rank 4"),
    (BSH, {"query": normal(2, 6, 4, 8)}, ValueError, "query", "rank 3"),
    (PLAIN, {"query": torch.ones(2, 4, 6, 8).int()}, TypeError, "query", "float16, bfloat16"),
    (PLAIN, {"key": normal(2, 2, 9, 8, dtype=torch.float16)}, TypeError, "key", "bfloat16"),
    (PLAIN, {"value": normal(2, 2, 9, 8, dtype=torch.float32)}, TypeError, "value", "bfloat16"),
    (PLAIN, {"num_heads": 0}, ValueError, "num_heads", "positive"),
    (PLAIN, {"num_heads": 2}, ValueError, "num_heads", "N = 4, got 2"),
    (BSH, {"num_heads": 5}, ValueError, "query", "multiple of num_heads = 5"),
    (BSH, {"key": normal(2, 9, 12)}, ValueError, "key", "multiple of D = 8"),
    (BSH, {"value": normal(2, 9, 13)}, ValueError, "value", "multiple of key's heads, 2"),
    (BSH, {"key": normal(2, 9, 24), "value": normal(2, 9, 24)}, ValueError, "key", "divides"),
    (PLAIN, {"key": normal(2, 2, 9, 4)}, ValueError, "key", "D = 8"),
    (PLAIN, {"key": normal(2, 3, 9, 8), "value": normal(2, 3, 9, 8)}, ValueError, "key", "divides"),
    (PLAIN, {"value": normal(2, 4, 9, 8)}, ValueError, "value", "number of heads, 2"),
    (PLAIN, {"value": normal(2, 2, 9, 10)}, ValueError, "value", "at most query's, 8"),
    (PLAIN, {"value": normal(2, 2, 8, 8)}, ValueError, "value", "tokens as key, 9"),
    (PLAIN, {"key": normal(3, 2, 9, 8)}, ValueError, "key", "batch size 2"),
    (PLAIN, {"value": normal(1, 2, 9, 8)}, ValueError, "value", "batch size 2"),
    (PLAIN, {LENGTHS[0]: [6, 12]}, ValueError, LENGTHS[0], "TND"),
    (PLAIN, {LENGTHS[1]: [9, 18]}, ValueError, LENGTHS[1], "TND"),
    (TND, {LENGTHS[0]: None}, ValueError, LENGTHS[0], "prefix sums"),
    (TND, {LENGTHS[1]: []}, ValueError, LENGTHS[1], "prefix sums"),
    (TND, {LENGTHS[1]: [5]}, ValueError, LENGTHS[1], "as many lengths"),
    (TND, {LENGTHS[0]: [4, 3]}, ValueError, LENGTHS[0], "never decrease"),
    (TND, {LENGTHS[1]: [5, 14]}, ValueError, LENGTHS[1], "at most T = 13"),
    (PLAIN, {"sparse_mode": 9}, ValueError, "sparse_mode", "0, 1, 2, 3, 4, 5, 6 in layout BNSD"),
    (PLAIN, {"sparse_mode": 7}, ValueError, "sparse_mode", "needs layout TND"),
    (TND, {"sparse_mode": 5}, ValueError, "sparse_mode", "0, 1, 2, 3, 4, 6, 7, 8"),
    (TND, {"sparse_mode": -1}, ValueError, "sparse_mode", "0, 1, 2, 3, 4, 6, 7, 8"),
    (MASKED, {"atten_mask": torch.zeros(6, 9)}, TypeError, "atten_mask", "pse_shift"),
    (MASKED, {"atten_mask": bools(6, 9).to(torch.int8)}, TypeError, "atten_mask", "bool or uint8"),
    (MASKED, {"atten_mask": bools(2, 1, 1, 9)}, ValueError, "atten_mask", "not broadcast"),
    (MASKED, {"atten_mask": bools(1, 2, 6, 9)}, ValueError, "atten_mask", r"\(1, 1, Sq, Skv\)"),
    (MASKED, {"atten_mask": bools(2, 6, 9)}, ValueError, "atten_mask", r"or \(Sq, Skv\)"),
    (BAND, {"atten_mask": bools(6, 9)}, ValueError, "atten_mask", r"\(2048, 2048\)"),
    (PREFIX, {"atten_mask": COMPRESSED}, ValueError, "atten_mask", r"\(3072, 2048\)"),
    (FULL_PREFIX, {"atten_mask": bools(6, 9)}, ValueError, "atten_mask", r"\(B, 1, Sq, Skv\)"),
    (TND, {"sparse_mode": 1, "atten_mask": bools(7, 11)}, ValueError, "atten_mask", r"\[4, 6\]"),
    (BAND, {"pre_tokens": -4, "next_tokens": -4}, ValueError, "pre_tokens", "both"),
    (BAND, {"pre_tokens": -20, "next_tokens": 30}, ValueError, "pre_tokens", "Skv = 9"),
    (BAND, {"pre_tokens": -5, "next_tokens": 0}, ValueError, "pre_tokens", "next_tokens"),
    (BAND, {"pre_tokens": 8, "next_tokens": -9}, ValueError, "next_tokens", "Sq = 6"),
    (MASKED, {"pre_tokens": -1, "next_tokens": -1}, ValueError, "pre_tokens", "both"),
    (MASKED, {"pre_tokens": 2, "next_tokens": -3}, ValueError, "next_tokens", "pre_tokens in size"),
    (PREFIX, {"prefix": None}, ValueError, "prefix", "per batch"),
    (PREFIX, {"prefix": []}, ValueError, "prefix", "per batch"),
    (PREFIX, {"prefix": [4]}, ValueError, "prefix", "per batch, 2, got 1"),
    (PREFIX, {"prefix": [4, 2]}, ValueError, "prefix", r"3\.\.9"),
    (PREFIX, {"prefix": [4, 10]}, ValueError, "prefix", r"3\.\.9"),
    (LONG_PREFIX, {"prefix": [0, -1]}, ValueError, "prefix", r"0\.\.6"),
    (LONG_PREFIX, {"prefix": [7, 6]}, ValueError, "prefix", r"0\.\.6"),
    (
        TND,
        {"sparse_mode": 4, "atten_mask": COMPRESSED, "pre_tokens": -5, "next_tokens": -5},
        ValueError,
        "pre_tokens",
        "both",
    ),
    (
        TND,
        {"sparse_mode": 4, "atten_mask": COMPRESSED, "next_tokens": -5},
        ValueError,
        "next_tokens",
        "Sq = 3",
    ),
    (
        TND,
        {"sparse_mode": 0, "atten_mask": bools(4, 6), "next_tokens": -1},
        ValueError,
        "next_tokens",
        "at least 0",
    ),
    (
        TND,
        {"sparse_mode": 0, "atten_mask": bools(4, 6), "pre_tokens": -4},
        ValueError,
        "pre_tokens",
        "Sq - Skv",
    ),
    (
        TND,
        {"sparse_mode": 3, "atten_mask": COMPRESSED, LENGTHS[1]: [2, 8]},
        ValueError,
        "sparse_mode",
        "more queries than keys",
    ),
    (
        TND,
        {"sparse_mode": 7, "atten_mask": COMPRESSED, "pre_tokens": 5, "next_tokens": 0},
        ValueError,
        "pre_tokens",
        "last sequence, 6",
    ),
    (
        TND,
        {"sparse_mode": 7, "atten_mask": COMPRESSED, "next_tokens": 1},
        ValueError,
        "next_tokens",
        "at most 0",
    ),
    (
        TND,
        {"sparse_mode": 8, "atten_mask": COMPRESSED, "pre_tokens": 4},
        ValueError,
        "pre_tokens",
        "first sequence, 5",
    ),
    (
        TND,
        {"sparse_mode": 8, "atten_mask": COMPRESSED, "next_tokens": -3},
        ValueError,
        "next_tokens",
        "first sequence, -2",
    ),
    (PLAIN, {"pse_type": 4}, ValueError, "pse_type", "expected 0"),
    (PLAIN, {"pse_type": 0}, ValueError, "pse_shift", "got None"),
    (PLAIN, {"inner_precise": 3}, ValueError, "inner_precise", "0, 1 or 2"),
    (PSE, {"pse_shift": normal(2, 2, 6, 9).float()}, TypeError, "pse_shift", "bfloat16"),
    (PSE, {"pse_shift": normal(1, 1, 6, 9)}, ValueError, "pse_shift", r"\(1, N, Sq, Skv\)"),
    (PSE, {"pse_shift": normal(6, 9)}, ValueError, "pse_shift", r"\(B, N, 1, Skv\)"),
    (TND, {"pse_shift": normal(2, 4, 6)}, ValueError, "pse_shift", r"N \* T2"),
    (TND, {"pse_shift": normal(50)}, ValueError, "pse_shift", r"N \* Sq \* Skv .* = 78"),
    (SLOPES, {"pse_shift": normal(2)}, TypeError, "pse_shift", "float32"),
    (SLOPES, {"pse_shift": torch.ones(3)}, ValueError, "pse_shift", r"\(N\) or \(B, N\)"),
    (
        PLAIN,
        {"pse_shift": torch.ones(4), "pse_type": 3},
        ValueError,
        "pse_type",
        "Sq = Skv",
    ),
    (PLAIN, {"keep_prob": 0.0}, ValueError, "keep_prob", r"\(0, 1\]"),
    (PLAIN, {"keep_prob": 1.5}, ValueError, "keep_prob", r"\(0, 1\]"),
    (PLAIN, {"keep_prob": 0.5}, ValueError, "drop_mask", "dropout_p"),
    (DROP, {"keep_prob": 1.0}, ValueError, "drop_mask", "expected None for keep_prob 1"),
    (DROP, {"drop_mask": bools(27)}, TypeError, "drop_mask", "uint8"),
    (DROP, {"drop_mask": bools(26).byte()}, ValueError, "drop_mask", "at least 27 bytes"),
]

each_rule = pytest.mark.parametrize(
    ("case", "changes", "exception", "argument", "words"),
    RULES,
    ids=[f"{c.layout}-{'-'.join(changes)}-{words}" for c, changes, _, _, words in RULES],
)


def operator_of(operator: str, case: FlashCase, changes: dict[str, Any]) -> Any:
    make = build_grad if operator.endswith("grad") else build
    sample = make(case, torch.bfloat16)
    inputs = {name: changes.get(name, x) for name, x in sample.inputs.items()}
    options = {
        **sample.options,
        **{name: x for name, x in changes.items() if name not in inputs},
    }
    return getattr(torch.ops.ascend, operator), inputs, options


@each_rule
@pytest.mark.parametrize("operator", ["flash_attention_score", "flash_attention_score_grad"])
@pytest.mark.usefixtures("no_limits")
def test_rules(
    operator: str,
    case: FlashCase,
    changes: dict[str, Any],
    exception: type[Exception],
    argument: str,
    words: str,
) -> None:
    function, inputs, options = operator_of(operator, case, changes)
    with pytest.raises(exception, match=words) as error:
        function(*inputs.values(), **options)
    form = rf"ascend::{operator}: {argument}: expected .+, got .+ \[ACLNN_ERR_PARAM_\w+ 16100\d\]"
    assert re.fullmatch(form, str(error.value)), error.value
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in {**inputs, **options}.items()
        }
        positional, keywords = [fake.pop(name) for name in inputs], fake
        with pytest.raises(exception, match=rf"{argument}: .*{words}"):
            function(*positional, **keywords)


GRAD_RULES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dy": normal(2, 4, 6, 4)}, ValueError, "dy"),
    ({"dy": normal(2, 4, 6, 8).float()}, TypeError, "dy"),
    ({"attention_in": normal(2, 4, 5, 8)}, ValueError, "attention_in"),
    ({"softmax_max": torch.ones(2, 4, 6, 1)}, ValueError, "softmax_max"),
    ({"softmax_sum": torch.ones(2, 6, 4, 8)}, ValueError, "softmax_sum"),
    ({"softmax_sum": normal(2, 4, 6, 8)}, TypeError, "softmax_sum"),
]


@pytest.mark.parametrize(("changes", "exception", "argument"), GRAD_RULES, ids=str)
def test_rules_of_the_gradient(
    changes: dict[str, Any], exception: type[Exception], argument: str
) -> None:
    function, inputs, options = operator_of("flash_attention_score_grad", PLAIN, changes)
    with pytest.raises(exception, match=rf"^ascend::flash_attention_score_grad: {argument}: "):
        function(*inputs.values(), **options)


WRONG_CONTENT = [
    (BAND, COMPRESSED.logical_not()),
    (BAND, COMPRESSED.T.contiguous()),
    (BAND, torch.zeros_like(COMPRESSED)),
    (PREFIX, torch.cat((COMPRESSED, COMPRESSED[:1024]))),
    (FULL_PREFIX, bools(2, 2, 6, 9)),
]


each_direction = pytest.mark.parametrize("build", [build, build_grad], ids=["forward", "gradient"])


@each_direction
@pytest.mark.parametrize(("case", "mask"), WRONG_CONTENT, ids=range(len(WRONG_CONTENT)))
def test_content_of_masks(build: Any, case: FlashCase, mask: torch.Tensor) -> None:
    sample = build(case, torch.bfloat16).replace(atten_mask=mask)
    with pytest.raises(ValueError, match=r"atten_mask: .* got other values; True \(1\) masks"):
        sample.call(torch.ops.ascend)


@each_direction
@pytest.mark.parametrize("wrong", [0.0, -0.5, torch.nan])
def test_slopes_are_positive(build: Any, wrong: float) -> None:
    slopes = torch.tensor([1.0, wrong])
    with pytest.raises(ValueError, match="pse_shift: expected positive slopes"):
        build(SLOPES, torch.bfloat16).replace(pse_shift=slopes).call(torch.ops.ascend)


def test_pse_of_1024_rows_needs_a_causal_mask() -> None:
    case = FlashCase(b=1, s=(1030, 1030), heads=(1, 1), pse="rows", mode=0, mask="")
    with pytest.raises(ValueError, match="atten_mask: expected every key behind the query"):
        build(case, torch.bfloat16).call(torch.ops.ascend)
    without = build(case, torch.bfloat16).replace(atten_mask=None)
    with pytest.raises(ValueError, match=r"pse_shift: .* sparse_mode 0, 2 or 3"):
        without.call(torch.ops.ascend)


def test_limits() -> None:
    def call(heads: int, d: int, dtype: torch.dtype) -> None:
        x = torch.zeros(1, heads, 1, d, dtype=dtype)
        flash_attention_score(x, x, x, num_heads=heads, layout="BNSD")

    call(256, 512, torch.float32)
    with pytest.raises(ValueError, match=r"query: expected N \(query heads\) to be 1\.\.256"):
        call(257, 8, torch.float32)
    with pytest.raises(ValueError, match=r"query: expected D \(head size\) to be 1\.\.512"):
        call(1, 513, torch.float32)
    with pytest.raises(TypeError, match="query: expected dtype float16 or bfloat16 or float32"):
        call(1, 8, torch.float64)
    with ascend_attn_ops.limits("310P"), pytest.raises(NotImplementedError, match="product"):
        call(1, 8, torch.float16)


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"attn_mask": torch.zeros(6, 9)}, TypeError, "attn_mask: .* pse_shift takes"),
        ({"attn_mask": bools(6, 9).byte()}, TypeError, "attn_mask: expected dtype bool"),
        ({"attn_mask": bools(6, 9), "atten_mask": bools(6, 9)}, ValueError, "attn_mask: .* both"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability"),
        ({"dropout_p": 0.5, "keep_prob": 0.5}, ValueError, "dropout_p: expected 0 beside"),
    ],
    ids=["float", "uint8", "both", "one", "twice"],
)
def test_public_function(options: dict[str, Any], exception: type[Exception], words: str) -> None:
    inputs = build(PLAIN, torch.bfloat16).inputs
    with pytest.raises(exception, match=rf"^ascend::flash_attention_score: {words}"):
        flash_attention_score(*inputs.values(), num_heads=4, layout="BNSD", **options)
