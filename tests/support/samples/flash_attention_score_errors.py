"""Calls that flash_attention_score and its gradient must refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from ascend_attn_check.samples.flash_attention_score import (
    FLASH_ATTENTION_SCORE,
    FLASH_ATTENTION_SCORE_GRAD,
    OPERATORS,
    FlashCase,
    build,
)
from ascend_attn_check.samples.record import Operator

from .wrong_call import COMPRESSED, LENGTHS, WrongCall, bools, normal, statistics_rules, wrong_call

PLAIN = FlashCase(s=(6, 9), heads=(4, 2), d=(8, 8))
BSH = FlashCase(layout="BSH", s=(6, 9), heads=(4, 2), d=(8, 8))
TND = FlashCase(layout="TND", lengths=((3, 4), (5, 6)), tail=(1, 2), heads=(2, 2), d=(8, 8))
MASKED = FlashCase(s=(6, 9), mode=0, mask="", heads=(2, 2), d=(8, 8))
ROWS = replace(MASKED, mode=1)
BAND = FlashCase(s=(6, 9), mode=4, pre=3, next=2, heads=(2, 2), d=(8, 8))
PREFIX = FlashCase(s=(6, 9), mode=6, prefix=(4, 5), heads=(2, 2), d=(8, 8))
FULL_PREFIX = FlashCase(s=(6, 9), mode=5, prefix=(4, 5), heads=(2, 2), d=(8, 8))
PSE = FlashCase(s=(6, 9), pse="full", heads=(2, 2), d=(8, 8))
LONG_PREFIX = FlashCase(s=(9, 6), mode=6, prefix=(4, 5), heads=(2, 2), d=(8, 8))
SLOPES = FlashCase(s=(6, 6), pse="N", pse_type=2, heads=(2, 2), d=(8, 8))
DROP = FlashCase(s=(6, 9), keep_prob=0.5, heads=(2, 2), d=(8, 8))
ODD_DROP = FlashCase(b=1, s=(5, 9), keep_prob=0.5, heads=(2, 2), d=(8, 8))  # 90 bits

CAUSAL_PSE = FlashCase(
    b=1, s=(1030, 1030), heads=(1, 1), pse="rows", mode=0, mask="", pattern="causal"
)
ONE_TOKEN = FlashCase(b=1, s=(1, 1), heads=(1, 1), d=(8, 8))


def rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong calls of both directions."""
    wrong = partial(wrong_call, operator)
    wrong_type = partial(wrong, exception=TypeError)
    wrong_value = partial(wrong, on_meta=False)
    yield from (
        wrong(PLAIN, "BSH, SBH, BSND, BNSD, TND", layout="BNDS"),
        wrong(PLAIN, "rank 4", query=normal(2, 6, 32)),
        wrong(BSH, "rank 3", query=normal(2, 6, 4, 8)),
        wrong_type(PLAIN, "float16, bfloat16", query=torch.ones(2, 4, 6, 8).int()),
        wrong_type(PLAIN, "bfloat16", key=normal(2, 2, 9, 8, dtype=torch.float16)),
        wrong_type(PLAIN, "bfloat16", value=normal(2, 2, 9, 8, dtype=torch.float32)),
        wrong(PLAIN, "positive", num_heads=0),
        wrong(PLAIN, "query: num_heads = 2 on axis 1 of layout BNSD", num_heads=2),
        wrong(BSH, "query: multiple of num_heads = 5", num_heads=5),
        wrong(BSH, "multiple of D = 8", key=normal(2, 9, 12)),
        wrong(BSH, "multiple of key's heads = 2", value=normal(2, 9, 13)),
        wrong(BSH, "divides", key=normal(2, 9, 24), value=normal(2, 9, 24)),
        wrong(PLAIN, "D = 8", key=normal(2, 2, 9, 4)),
        wrong(PLAIN, "divides", key=normal(2, 3, 9, 8), value=normal(2, 3, 9, 8)),
        wrong(PLAIN, "value: key's heads = 2 on axis 1", value=normal(2, 4, 9, 8)),
        wrong(PLAIN, "at most query's, 8", value=normal(2, 2, 9, 10)),
        wrong(PLAIN, "tokens as key, 9", value=normal(2, 2, 8, 8)),
        wrong(PLAIN, "batch size 2", key=normal(3, 2, 9, 8)),
        wrong(PLAIN, "batch size 2", value=normal(1, 2, 9, 8)),
        wrong_value(PLAIN, r"counts in 0\.\.S = 6, got 12", **{LENGTHS[0]: [6, 12]}),
        wrong_value(PLAIN, r"counts in 0\.\.S = 9, got -1", **{LENGTHS[1]: [9, -1]}),
        wrong(TND, "cumulative sequence lengths", **{LENGTHS[0]: None}),
        wrong(TND, "cumulative sequence lengths", **{LENGTHS[1]: []}),
        wrong(TND, "as many lengths", **{LENGTHS[1]: [5]}),
        wrong_value(TND, "never decrease", **{LENGTHS[0]: [4, 3]}),
        wrong_value(TND, "at most T = 13", **{LENGTHS[1]: [5, 14]}),
        wrong(PLAIN, "0, 1, 2, 3, 4, 5, 6 in layout BNSD", sparse_mode=9),
        wrong(PLAIN, "needs layout TND", sparse_mode=7),
        wrong(TND, "0, 1, 2, 3, 4, 6, 7, 8", sparse_mode=5),
        wrong(TND, "0, 1, 2, 3, 4, 6, 7, 8", sparse_mode=-1),
        wrong_type(MASKED, "pse_shift", atten_mask=torch.zeros(6, 9)),
        wrong_type(MASKED, "bool or uint8", atten_mask=bools(6, 9).to(torch.int8)),
        wrong(MASKED, "axes may be 1, or", atten_mask=bools(1, 3, 6, 9)),
        wrong(MASKED, r"or \(Sq, Skv\)", atten_mask=bools(2, 6, 9)),
        wrong(BAND, r"\(2048, 2048\)", atten_mask=bools(6, 9)),
        wrong(PREFIX, r"\(3072, 2048\)", atten_mask=COMPRESSED),
        wrong(FULL_PREFIX, r"\(B, 1, Sq, Skv\)", atten_mask=bools(6, 9)),
        wrong_value(TND, "atten_mask: maxSkv = 2, 2, 4, 6 and sums 7, 11, got", sparse_mode=1,
              atten_mask=bools(7, 10)),
        wrong_value(TND, "never decrease", **{LENGTHS[0]: [3, 0]}),
        wrong_value(TND, "never decrease", **{LENGTHS[0]: [3, 0, 0], LENGTHS[1]: [5, 11, 0]}),
        wrong(BAND, "both", pre_tokens=-4, next_tokens=-4),
        wrong(BAND, "Skv = 9", pre_tokens=-20, next_tokens=30),
        wrong(BAND, "smaller than Skv = 9", pre_tokens=-6, next_tokens=30),
        wrong(BAND, "next_tokens", pre_tokens=-5, next_tokens=0),
        wrong(BAND, "next_tokens: Sq = 6", pre_tokens=8, next_tokens=-9),
        wrong(MASKED, "both", pre_tokens=-1, next_tokens=-1),
        wrong(MASKED, "next_tokens: pre_tokens in size", pre_tokens=2, next_tokens=-3),
        wrong(PREFIX, "per batch", prefix=None),
        wrong(PREFIX, "per batch", prefix=[]),
        wrong(PREFIX, "per batch, 2, got 1", prefix=[4]),
        wrong_value(PREFIX, r"3\.\.9", prefix=[4, 2]),
        wrong_value(PREFIX, r"3\.\.9", prefix=[4, 10]),
        wrong_value(LONG_PREFIX, r"0\.\.6", prefix=[0, -1]),
        wrong_value(LONG_PREFIX, r"0\.\.6", prefix=[7, 6]),
        wrong_value(TND, "pre_tokens: both", sparse_mode=4, atten_mask=COMPRESSED, pre_tokens=-5,
              next_tokens=-5),
        wrong_value(TND, "next_tokens: Sq = 3", sparse_mode=4, atten_mask=COMPRESSED,
              next_tokens=-5),
        wrong_value(TND, "next_tokens: at least 0", sparse_mode=0, atten_mask=bools(4, 6),
              next_tokens=-1),
        wrong_value(TND, "pre_tokens: Sq - Skv", sparse_mode=0, atten_mask=bools(4, 6),
              pre_tokens=-4),
        wrong_value(TND, "pre_tokens: last sequence, 6", sparse_mode=7, atten_mask=COMPRESSED,
              pre_tokens=5, next_tokens=0),
        wrong_value(TND, "next_tokens: at most 0", sparse_mode=7, atten_mask=COMPRESSED,
              next_tokens=1),
        wrong_value(TND, "pre_tokens: first sequence, 5", sparse_mode=8, atten_mask=COMPRESSED,
              pre_tokens=4),
        wrong_value(TND, "next_tokens: first sequence, -2", sparse_mode=8, atten_mask=COMPRESSED,
              next_tokens=-3),
        wrong(PLAIN, "expected 0", pse_type=4),
        wrong(PLAIN, "pse_shift: expected slopes for pse_type 2, got None", pse_type=2),
        wrong_type(PSE, "bfloat16", pse_shift=normal(2, 2, 6, 9).float()),
        wrong(PSE, "axes B, N and Sq may be 1", pse_shift=normal(6, 9)),
        wrong(PSE, "axes B, N and Sq may be 1", pse_shift=normal(2, 2, 6, 1)),
        wrong_value(TND, r"sum of N \* Skv = 22", pse_shift=normal(2, 4, 6)),
        wrong_value(TND, "one axis", pse_shift=normal(26)),
        wrong_value(TND, "Sq = Skv > 1024", pse_shift=normal(2, 2, 1024, 6)),
        wrong_value(TND, r"N \* Sq \* Skv .* = 78", pse_shift=normal(50)),
        wrong_type(SLOPES, "float32", pse_shift=normal(2)),
        wrong(SLOPES, r"\(N\) or \(B, N\)", pse_shift=torch.ones(3)),
        wrong(PLAIN, "pse_type: Sq = Skv", pse_shift=torch.ones(4), pse_type=3),
        wrong(PLAIN, r"\(0, 1\]", keep_prob=0.0),
        wrong(PLAIN, r"\(0, 1\]", keep_prob=1.5),
        wrong(PLAIN, r"\(0, 1\]", keep_prob=math.nan),
        wrong(DROP, "normal float32, got 4.94066e-324", keep_prob=5e-324),
        wrong(PLAIN, "drop_mask: dropout_p", keep_prob=0.5),
        wrong(PLAIN, "finite number", scale_value=math.nan),
        wrong(PLAIN, "finite number", scale_value=math.inf),
        wrong(PLAIN, "finite number", scale_value=-1e39),
        wrong(DROP, "drop_mask: expected None for keep_prob 1", keep_prob=1.0),
        wrong_type(DROP, "uint8", drop_mask=bools(27)),
        wrong(DROP, "at least 27 bytes", drop_mask=bools(26).byte()),
        wrong(ODD_DROP, "at least 12 bytes", drop_mask=bools(11).byte()),
    )  # fmt: skip
    # Modes that need a mask, without one.
    for case in (ROWS, FULL_PREFIX, replace(TND, mode=1, mask="max")):
        yield wrong(case, "None.*161001", atten_mask=None)
    # The values of masks and slopes.
    for case, mask in (
        (BAND, COMPRESSED.logical_not()),
        (BAND, COMPRESSED.T.contiguous()),
        (BAND, torch.zeros_like(COMPRESSED)),
        (PREFIX, torch.cat((COMPRESSED, COMPRESSED[:1024]))),
        (FULL_PREFIX, bools(2, 2, 6, 9)),
    ):
        expected = r"got other values; True \(1\) masks"
        yield wrong(case, expected, atten_mask=mask, on_meta=False)
    for slope in (0.0, -0.5, torch.nan):
        slopes = torch.tensor([1.0, slope])
        yield wrong(SLOPES, "expected positive slopes", pse_shift=slopes, on_meta=False)
    random = build(replace(CAUSAL_PSE, pattern="random"), torch.bfloat16).options["atten_mask"]
    expected = "expected every key behind the query"
    yield wrong(CAUSAL_PSE, expected, atten_mask=random, on_meta=False)
    yield wrong(CAUSAL_PSE, "pse_shift: sparse_mode 0, 2 or 3", atten_mask=None)
    # The limits of devices.
    heads = replace(ONE_TOKEN, heads=(257, 257))
    expected = r"query: expected N \(query heads\) to be 1\.\.256"
    yield wrong(heads, expected, limits="A2", dtype=torch.float32)
    if not operator.name.endswith("grad"):
        expected = r"query: expected D \(head size\) to be 1\.\.768"
        yield wrong(replace(ONE_TOKEN, d=(769, 769)), expected, limits="A2", dtype=torch.float32)
    expected = "query: expected dtype float16 or bfloat16 or float32"
    yield wrong_type(ONE_TOKEN, expected, limits="A2", dtype=torch.float64)
    yield wrong(ONE_TOKEN, "product: ", NotImplementedError, limits="310P", dtype=torch.float16)


def gradient_rules() -> Iterator[WrongCall]:
    wrong = partial(wrong_call, FLASH_ATTENTION_SCORE_GRAD, PLAIN, "")
    yield wrong(dy=normal(2, 4, 6, 4))
    yield wrong(dy=normal(2, 4, 6, 8).float(), exception=TypeError)
    yield wrong(attention_in=normal(2, 4, 5, 8))
    yield wrong(softmax_max=torch.ones(2, 4, 6, 1))
    yield wrong(softmax_sum=torch.ones(2, 6, 4, 8))
    yield wrong(softmax_sum=normal(2, 4, 6, 8), exception=TypeError)


def sink_and_rope_rules() -> Iterator[WrongCall]:
    """The forward alone has them: its gradients are those of an operator that autograd calls."""
    wrong = partial(wrong_call, FLASH_ATTENTION_SCORE)
    wrong_type = partial(wrong, exception=TypeError)
    sink = replace(PLAIN, sink=True)
    rope, merged = replace(PLAIN, rope=4), replace(BSH, rope=4)
    one_per_head = r"shape \(4\), one score per query head"
    yield wrong(sink, rf"{one_per_head}, got \[3\]", sink=torch.ones(3))
    yield wrong(sink, rf"{one_per_head}, got \[1, 4\]", sink=torch.ones(1, 4))
    yield wrong(sink, rf"{one_per_head}, got \[0\]", sink=torch.ones(0))
    yield wrong_type(sink, "floating-point dtype, got int64", sink=torch.ones(4).long())
    yield wrong(rope, "because query_rope is given", key_rope=None)
    yield wrong(rope, "because key_rope is given", query_rope=None)
    yield wrong(rope, "query's shape with Dr = 4", query_rope=normal(2, 4, 5, 4))
    yield wrong(rope, "rank 4", query_rope=normal(4, 6, 4))
    yield wrong(rope, "at least 1", query_rope=normal(2, 4, 6, 0))
    yield wrong(rope, "key's shape with Dr = 4", key_rope=normal(2, 2, 9, 5))
    yield wrong(rope, "key's shape with Dr = 4", key_rope=normal(2, 1, 9, 4))
    yield wrong_type(rope, "bfloat16", key_rope=normal(2, 2, 9, 4).half())
    yield wrong(merged, "multiple of num_heads = 4", query_rope=normal(2, 6, 18))
    yield wrong(merged, "key's shape with Dr = 4", key_rope=normal(2, 9, 16))
    wide = replace(ONE_TOKEN, d=(512, 512), rope=257)
    yield wrong(wide, r"query_rope: D \(head size\) to be 1\.\.768.* got 769", limits="A2")


WRONG_CALLS = [
    *sink_and_rope_rules(), *(row for operator in OPERATORS for row in rules(operator)),
    *gradient_rules(), *statistics_rules(FLASH_ATTENTION_SCORE_GRAD, PLAIN),
]  # fmt: skip
