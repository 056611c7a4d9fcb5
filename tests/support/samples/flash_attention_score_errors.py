"""Calls that flash_attention_score and its gradient must refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from ascend_attn_ops.check.samples.flash_attention_score import (
    FLASH_ATTENTION_SCORE,
    FLASH_ATTENTION_SCORE_GRAD,
    OPERATORS,
    FlashCase,
    build,
)
from ascend_attn_ops.check.samples.masks import compressed_mask
from ascend_attn_ops.check.samples.record import Operator

from .wrong_call import Change, Product, WrongCall, bools, normal, statistics_rules

PLAIN = FlashCase(s=(6, 9), heads=(4, 2), d=(8, 8))
BSH = FlashCase(layout="BSH", s=(6, 9), heads=(4, 2), d=(8, 8))
TND = FlashCase(layout="TND", lengths=((3, 4), (5, 6)), tail=(1, 2), heads=(2, 2), d=(8, 8))
MASKED = FlashCase(s=(6, 9), mode=0, mask="", heads=(2, 2), d=(8, 8))
ROWS = replace(MASKED, mode=1)
CAUSAL = replace(MASKED, mode=3)
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
TND_MASKED = [
    *(replace(TND, mode=mode, mask="max") for mode in (1, 2, 3)),
    replace(TND, mode=7, pre=9, next=-1, lengths=((3, 4, 0), (5, 9, 3))),
    replace(TND, mode=8, pre=9, next=2, lengths=((0, 4, 5), (3, 6, 5))),
]
ONE_TOKEN = FlashCase(b=1, s=(1, 1), heads=(1, 1), d=(8, 8))

COMPRESSED = compressed_mask(3, torch.bool)
LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


def rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong calls of both directions."""

    def wrong(
        case: FlashCase,
        change: Change | dict[str, Any],
        argument: str,
        expected: str,
        exception: type[Exception] = ValueError,
        *,
        on_meta: bool = True,
    ) -> WrongCall:
        name = "-".join(change) if isinstance(change, dict) else argument
        return WrongCall(
            f"{case.layout}-{name}-{expected}", operator, case, change, argument, exception,
            expected, code=r"16100\d", on_meta=on_meta,
        )  # fmt: skip

    yield from (
        wrong(PLAIN, {"layout": "BNDS"}, "layout", "BSH, SBH, BSND, BNSD, TND"),
        wrong(PLAIN, {"query": normal(2, 6, 32)}, "query", "rank 4"),
        wrong(BSH, {"query": normal(2, 6, 4, 8)}, "query", "rank 3"),
        wrong(
            PLAIN, {"query": torch.ones(2, 4, 6, 8).int()}, "query", "float16, bfloat16", TypeError
        ),
        wrong(
            PLAIN, {"key": normal(2, 2, 9, 8, dtype=torch.float16)}, "key", "bfloat16", TypeError
        ),
        wrong(
            PLAIN,
            {"value": normal(2, 2, 9, 8, dtype=torch.float32)},
            "value",
            "bfloat16",
            TypeError,
        ),
        wrong(PLAIN, {"num_heads": 0}, "num_heads", "positive"),
        wrong(PLAIN, {"num_heads": 2}, "num_heads", "N = 4, got 2"),
        wrong(BSH, {"num_heads": 5}, "query", "multiple of num_heads = 5"),
        wrong(BSH, {"key": normal(2, 9, 12)}, "key", "multiple of D = 8"),
        wrong(BSH, {"value": normal(2, 9, 13)}, "value", "multiple of key's heads, 2"),
        wrong(BSH, {"key": normal(2, 9, 24), "value": normal(2, 9, 24)}, "key", "divides"),
        wrong(PLAIN, {"key": normal(2, 2, 9, 4)}, "key", "D = 8"),
        wrong(PLAIN, {"key": normal(2, 3, 9, 8), "value": normal(2, 3, 9, 8)}, "key", "divides"),
        wrong(PLAIN, {"value": normal(2, 4, 9, 8)}, "value", "number of heads, 2"),
        wrong(PLAIN, {"value": normal(2, 2, 9, 10)}, "value", "at most query's, 8"),
        wrong(PLAIN, {"value": normal(2, 2, 8, 8)}, "value", "tokens as key, 9"),
        wrong(PLAIN, {"key": normal(3, 2, 9, 8)}, "key", "batch size 2"),
        wrong(PLAIN, {"value": normal(1, 2, 9, 8)}, "value", "batch size 2"),
        wrong(PLAIN, {LENGTHS[0]: [6, 12]}, LENGTHS[0], "TND"),
        wrong(PLAIN, {LENGTHS[1]: [9, 18]}, LENGTHS[1], "TND"),
        wrong(TND, {LENGTHS[0]: None}, LENGTHS[0], "cumulative sequence lengths"),
        wrong(TND, {LENGTHS[1]: []}, LENGTHS[1], "cumulative sequence lengths"),
        wrong(TND, {LENGTHS[1]: [5]}, LENGTHS[1], "as many lengths"),
        wrong(TND, {LENGTHS[0]: [4, 3]}, LENGTHS[0], "never decrease"),
        wrong(TND, {LENGTHS[1]: [5, 14]}, LENGTHS[1], "at most T = 13"),
        wrong(PLAIN, {"sparse_mode": 9}, "sparse_mode", "0, 1, 2, 3, 4, 5, 6 in layout BNSD"),
        wrong(PLAIN, {"sparse_mode": 7}, "sparse_mode", "needs layout TND"),
        wrong(TND, {"sparse_mode": 5}, "sparse_mode", "0, 1, 2, 3, 4, 6, 7, 8"),
        wrong(TND, {"sparse_mode": -1}, "sparse_mode", "0, 1, 2, 3, 4, 6, 7, 8"),
        wrong(MASKED, {"atten_mask": torch.zeros(6, 9)}, "atten_mask", "pse_shift", TypeError),
        wrong(
            MASKED,
            {"atten_mask": bools(6, 9).to(torch.int8)},
            "atten_mask",
            "bool or uint8",
            TypeError,
        ),
        wrong(
            MASKED,
            {"atten_mask": bools(2, 1, 1, 9)},
            "atten_mask",
            "expands axes of 1 of masks with four axes",
        ),
        wrong(MASKED, {"atten_mask": bools(1, 2, 6, 9)}, "atten_mask", r"\(1, 1, Sq, Skv\)"),
        wrong(MASKED, {"atten_mask": bools(2, 6, 9)}, "atten_mask", r"or \(Sq, Skv\)"),
        wrong(BAND, {"atten_mask": bools(6, 9)}, "atten_mask", r"\(2048, 2048\)"),
        wrong(PREFIX, {"atten_mask": COMPRESSED}, "atten_mask", r"\(3072, 2048\)"),
        wrong(FULL_PREFIX, {"atten_mask": bools(6, 9)}, "atten_mask", r"\(B, 1, Sq, Skv\)"),
        wrong(
            TND,
            {"sparse_mode": 1, "atten_mask": bools(7, 10)},
            "atten_mask",
            "maxSkv = 2, 2, 4, 6 and sums 7, 11, got",
        ),
        wrong(TND, {LENGTHS[0]: [3, 0]}, LENGTHS[0], "never decrease"),
        wrong(TND, {LENGTHS[0]: [3, 0, 0], LENGTHS[1]: [5, 11, 0]}, LENGTHS[0], "never decrease"),
        wrong(BAND, {"pre_tokens": -4, "next_tokens": -4}, "pre_tokens", "both"),
        wrong(BAND, {"pre_tokens": -20, "next_tokens": 30}, "pre_tokens", "Skv = 9"),
        wrong(BAND, {"pre_tokens": -6, "next_tokens": 30}, "pre_tokens", "smaller than Skv = 9"),
        wrong(BAND, {"pre_tokens": -5, "next_tokens": 0}, "pre_tokens", "next_tokens"),
        wrong(BAND, {"pre_tokens": 8, "next_tokens": -9}, "next_tokens", "Sq = 6"),
        wrong(MASKED, {"pre_tokens": -1, "next_tokens": -1}, "pre_tokens", "both"),
        wrong(MASKED, {"pre_tokens": 2, "next_tokens": -3}, "next_tokens", "pre_tokens in size"),
        wrong(PREFIX, {"prefix": None}, "prefix", "per batch"),
        wrong(PREFIX, {"prefix": []}, "prefix", "per batch"),
        wrong(PREFIX, {"prefix": [4]}, "prefix", "per batch, 2, got 1"),
        wrong(PREFIX, {"prefix": [4, 2]}, "prefix", r"3\.\.9"),
        wrong(PREFIX, {"prefix": [4, 10]}, "prefix", r"3\.\.9"),
        wrong(LONG_PREFIX, {"prefix": [0, -1]}, "prefix", r"0\.\.6"),
        wrong(LONG_PREFIX, {"prefix": [7, 6]}, "prefix", r"0\.\.6"),
        wrong(
            TND,
            {"sparse_mode": 4, "atten_mask": COMPRESSED, "pre_tokens": -5, "next_tokens": -5},
            "pre_tokens",
            "both",
        ),
        wrong(
            TND,
            {"sparse_mode": 4, "atten_mask": COMPRESSED, "next_tokens": -5},
            "next_tokens",
            "Sq = 3",
        ),
        wrong(
            TND,
            {"sparse_mode": 0, "atten_mask": bools(4, 6), "next_tokens": -1},
            "next_tokens",
            "at least 0",
        ),
        wrong(
            TND,
            {"sparse_mode": 0, "atten_mask": bools(4, 6), "pre_tokens": -4},
            "pre_tokens",
            "Sq - Skv",
        ),
        wrong(
            TND,
            {"sparse_mode": 7, "atten_mask": COMPRESSED, "pre_tokens": 5, "next_tokens": 0},
            "pre_tokens",
            "last sequence, 6",
        ),
        wrong(
            TND,
            {"sparse_mode": 7, "atten_mask": COMPRESSED, "next_tokens": 1},
            "next_tokens",
            "at most 0",
        ),
        wrong(
            TND,
            {"sparse_mode": 8, "atten_mask": COMPRESSED, "pre_tokens": 4},
            "pre_tokens",
            "first sequence, 5",
        ),
        wrong(
            TND,
            {"sparse_mode": 8, "atten_mask": COMPRESSED, "next_tokens": -3},
            "next_tokens",
            "first sequence, -2",
        ),
        wrong(PLAIN, {"pse_type": 4}, "pse_type", "expected 0"),
        wrong(PLAIN, {"pse_type": 2}, "pse_shift", "expected slopes for pse_type 2, got None"),
        wrong(PSE, {"pse_shift": normal(2, 2, 6, 9).float()}, "pse_shift", "bfloat16", TypeError),
        wrong(PSE, {"pse_shift": normal(1, 1, 6, 9)}, "pse_shift", r"\(1, N, Sq, Skv\)"),
        wrong(PSE, {"pse_shift": normal(6, 9)}, "pse_shift", r"\(B, N, 1, Skv\)"),
        wrong(TND, {"pse_shift": normal(2, 4, 6)}, "pse_shift", r"sum of N \* Skv = 22"),
        wrong(TND, {"pse_shift": normal(26)}, "pse_shift", "one axis"),
        wrong(TND, {"pse_shift": normal(2, 2, 1024, 6)}, "pse_shift", "Sq = Skv > 1024"),
        wrong(TND, {"pse_shift": normal(50)}, "pse_shift", r"N \* Sq \* Skv .* = 78"),
        wrong(SLOPES, {"pse_shift": normal(2)}, "pse_shift", "float32", TypeError),
        wrong(SLOPES, {"pse_shift": torch.ones(3)}, "pse_shift", r"\(N\) or \(B, N\)"),
        wrong(PLAIN, {"pse_shift": torch.ones(4), "pse_type": 3}, "pse_type", "Sq = Skv"),
        wrong(PLAIN, {"keep_prob": 0.0}, "keep_prob", r"\(0, 1\]"),
        wrong(PLAIN, {"keep_prob": 1.5}, "keep_prob", r"\(0, 1\]"),
        wrong(PLAIN, {"keep_prob": math.nan}, "keep_prob", r"\(0, 1\]"),
        wrong(DROP, {"keep_prob": 5e-324}, "keep_prob", "normal float32, got 4.94066e-324"),
        wrong(PLAIN, {"keep_prob": 0.5}, "drop_mask", "dropout_p"),
        wrong(PLAIN, {"scale_value": math.nan}, "scale_value", "finite number"),
        wrong(PLAIN, {"scale_value": math.inf}, "scale_value", "finite number"),
        wrong(PLAIN, {"scale_value": -1e39}, "scale_value", "finite number"),
        wrong(DROP, {"keep_prob": 1.0}, "drop_mask", "expected None for keep_prob 1"),
        wrong(DROP, {"drop_mask": bools(27)}, "drop_mask", "uint8", TypeError),
        wrong(DROP, {"drop_mask": bools(26).byte()}, "drop_mask", "at least 27 bytes"),
        wrong(ODD_DROP, {"drop_mask": bools(11).byte()}, "drop_mask", "at least 12 bytes"),
    )
    # Modes that need a mask, without one.
    for case in (ROWS, replace(ROWS, mode=2), CAUSAL, BAND, FULL_PREFIX, PREFIX, *TND_MASKED):
        row = wrong(case, {"atten_mask": None}, "atten_mask", "None.*161001")
        yield replace(row, id=f"{case.layout}-mode {case.mode} without a mask")
    # The values of masks and slopes.
    for case, mask in (
        (BAND, COMPRESSED.logical_not()),
        (BAND, COMPRESSED.T.contiguous()),
        (BAND, torch.zeros_like(COMPRESSED)),
        (PREFIX, torch.cat((COMPRESSED, COMPRESSED[:1024]))),
        (FULL_PREFIX, bools(2, 2, 6, 9)),
    ):
        expected = r"got other values; True \(1\) masks"
        yield wrong(case, {"atten_mask": mask}, "atten_mask", expected, on_meta=False)
    for slope in (0.0, -0.5, torch.nan):
        slopes = torch.tensor([1.0, slope])
        yield wrong(
            SLOPES, {"pse_shift": slopes}, "pse_shift", "expected positive slopes", on_meta=False
        )
    yield wrong(
        CAUSAL_PSE,
        lambda sample: sample.replace(
            atten_mask=build(replace(CAUSAL_PSE, pattern="random"), torch.bfloat16).options[
                "atten_mask"
            ]
        ),
        "atten_mask",
        "expected every key behind the query",
        on_meta=False,
    )
    yield wrong(CAUSAL_PSE, {"atten_mask": None}, "pse_shift", "sparse_mode 0, 2 or 3")


def limits(operator: Operator) -> Iterator[WrongCall]:
    def wrong(
        case: FlashCase,
        dtype: torch.dtype,
        argument: str,
        expected: str,
        exception: type[Exception] = ValueError,
        product: Product = "A2",
    ) -> WrongCall:
        return WrongCall(
            f"{product}-{expected}", operator, case, None, argument, exception, expected,
            limits=product, dtype=dtype,
        )  # fmt: skip

    many_heads = replace(ONE_TOKEN, heads=(257, 257))
    yield wrong(many_heads, torch.float32, "query", r"expected N \(query heads\) to be 1\.\.256")
    if not operator.name.endswith("grad"):
        large_heads = replace(ONE_TOKEN, d=(769, 769))
        yield wrong(large_heads, torch.float32, "query", r"expected D \(head size\) to be 1\.\.768")
    dtypes = "expected dtype float16 or bfloat16 or float32"
    yield wrong(ONE_TOKEN, torch.float64, "query", dtypes, TypeError)
    yield wrong(ONE_TOKEN, torch.float16, "product", "", NotImplementedError, "310P")


def gradient_rules() -> Iterator[WrongCall]:
    def wrong(
        change: dict[str, Any], argument: str, exception: type[Exception] = ValueError
    ) -> WrongCall:
        shape = list(change[argument].shape)
        return WrongCall(
            f"{argument}-{shape}", FLASH_ATTENTION_SCORE_GRAD, PLAIN, change, argument, exception
        )

    yield wrong({"dy": normal(2, 4, 6, 4)}, "dy")
    yield wrong({"dy": normal(2, 4, 6, 8).float()}, "dy", TypeError)
    yield wrong({"attention_in": normal(2, 4, 5, 8)}, "attention_in")
    yield wrong({"softmax_max": torch.ones(2, 4, 6, 1)}, "softmax_max")
    yield wrong({"softmax_sum": torch.ones(2, 6, 4, 8)}, "softmax_sum")
    yield wrong({"softmax_sum": normal(2, 4, 6, 8)}, "softmax_sum", TypeError)


def sink_and_rope_rules() -> Iterator[WrongCall]:
    """The forward alone has them: its gradients are those of an operator that autograd calls."""

    def wrong(
        case: FlashCase,
        change: dict[str, Any],
        argument: str,
        expected: str,
        exception: type[Exception] = ValueError,
        limits: Product | None = None,
    ) -> WrongCall:
        return WrongCall(
            f"{case.layout}-{argument}-{expected}", FLASH_ATTENTION_SCORE, case, change, argument,
            exception, expected, limits=limits, code=r"16100\d",
        )  # fmt: skip

    sink = replace(PLAIN, sink=True)
    rope, merged = replace(PLAIN, rope=4), replace(BSH, rope=4)
    one_per_head = r"shape \(4\), one score per query head"
    yield wrong(sink, {"sink": torch.ones(3)}, "sink", rf"{one_per_head}, got \[3\]")
    yield wrong(sink, {"sink": torch.ones(1, 4)}, "sink", rf"{one_per_head}, got \[1, 4\]")
    yield wrong(sink, {"sink": torch.ones(0)}, "sink", rf"{one_per_head}, got \[0\]")
    yield wrong(sink, {"sink": torch.ones(4).long()}, "sink", "dtype float32", TypeError)
    yield wrong(rope, {"key_rope": None}, "key_rope", "because query_rope is given")
    yield wrong(rope, {"query_rope": None}, "query_rope", "because key_rope is given")
    yield wrong(rope, {"query_rope": normal(2, 4, 5, 4)}, "query_rope", "query's shape with Dr = 4")
    yield wrong(rope, {"query_rope": normal(4, 6, 4)}, "query_rope", "rank 4")
    yield wrong(rope, {"query_rope": normal(2, 4, 6, 0)}, "query_rope", "at least 1")
    yield wrong(rope, {"key_rope": normal(2, 2, 9, 5)}, "key_rope", "key's shape with Dr = 4")
    yield wrong(rope, {"key_rope": normal(2, 1, 9, 4)}, "key_rope", "key's shape with Dr = 4")
    yield wrong(rope, {"key_rope": normal(2, 2, 9, 4).half()}, "key_rope", "bfloat16", TypeError)
    yield wrong(merged, {"query_rope": normal(2, 6, 18)}, "query_rope", "multiple of num_heads = 4")
    yield wrong(merged, {"key_rope": normal(2, 9, 16)}, "key_rope", "key's shape with Dr = 4")
    wide = replace(ONE_TOKEN, d=(512, 512), rope=257)
    yield WrongCall(
        "A2-ropes", FLASH_ATTENTION_SCORE, wide, None, "query_rope", ValueError,
        r"D \(head size\) to be 1\.\.768.* got 769", limits="A2",
    )  # fmt: skip


WRONG_CALLS = [
    *sink_and_rope_rules(),
    *(row for operator in OPERATORS for make in (rules, limits) for row in make(operator)),
    *gradient_rules(),
    *statistics_rules(FLASH_ATTENTION_SCORE_GRAD, PLAIN),
]
