"""Outputs and lists that FusedInferAttentionScore V4 refuses: its first phase, called directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_refusals import F32, I32, INVALID, First, new, pytestmark

__all__ = ["pytestmark"]

DENSE: dict[str, Any] = {
    "query": new(2, 4, 3, 64), "key": [new(2, 2, 9, 64)], "layout": "BNSD",
    "out": new(2, 4, 3, 64), "lse": new(2, 4, 3, 1, dtype=F32),
}  # fmt: skip
PACK: dict[str, Any] = {
    "query": new(5, 4, 64), "key": [new(7, 2, 64)], "layout": "TND", "queries": (2, 5),
    "keys": (3, 7), "out": new(5, 4, 64), "lse": new(5, 4, 1, dtype=F32),
}  # fmt: skip
PAGED: dict[str, Any] = {
    **DENSE, "key": [new(8, 16, 128)], "keys": (20, 3), "table": new(2, 2, dtype=I32),
}  # fmt: skip


def infer(call: dict[str, Any]) -> int:
    x = {"value": call["key"], "flag": True, "heads": 4} | call
    return First()(
        "FusedInferAttentionScoreV4", x["query"], x["key"], x["value"], None, None,
        x.get("queries"), x.get("keys"), *[None] * 7, x.get("table"), *[None] * 13, x.get("sink"),
        x["heads"], 1.0, 100, 100, x["layout"], 2, 0, 0, 16, 0, x["flag"], 0, 0, 0, x["out"],
        x["lse"],
    )  # fmt: skip


@pytest.mark.parametrize("call", [DENSE, PACK, PAGED], ids=["dense", "pack", "pages"])
def test_calls_that_fit(call: dict[str, Any]) -> None:
    assert infer(call) == 0
    assert infer({**call, "sink": new(4)}) == 0
    assert infer({**call, "flag": False, "lse": new(0, dtype=F32)}) == 0


@pytest.mark.parametrize(
    ("call", "change"),
    [
        (DENSE, {"out": new(2, 3, 4, 64)}),
        (DENSE, {"out": new(2, 4, 3, 64, dtype=torch.float16)}),
        (DENSE, {"out": new(2, 4, 3, 64, dtype=torch.int8)}),
        (DENSE, {"out": new(2, 3, 4, 32), "layout": "BNSD_BSND"}),
        (DENSE, {"lse": None}),
        (DENSE, {"lse": new(2, 4, 3, 1)}),
        (DENSE, {"lse": new(2, 4, 3, dtype=F32)}),
        (DENSE, {"sink": new(4, dtype=F32)}),
        (DENSE, {"sink": new(2)}),
        (DENSE, {"heads": 3}),
        (PACK, {"queries": (2, 4)}),
        (PACK, {"queries": (5, 2)}),
        (PACK, {"queries": None}),
        (PACK, {"keys": (3, 5)}),
        (PACK, {"keys": (7,)}),
        (PACK, {"lse": new(4, 5, 1, dtype=F32)}),
        (PAGED, {"keys": None}),
    ],
    ids=lambda x: "-".join(x) if len(x) < 4 else "",
)
def test_calls_that_do_not_fit(call: dict[str, Any], change: dict[str, Any]) -> None:
    assert infer(call | change) == INVALID


def test_lengths_of_three_batches() -> None:
    call = {**DENSE, "query": new(3, 4, 3, 64), "key": [new(3, 2, 9, 64)],
            "out": new(3, 4, 3, 64), "lse": new(3, 4, 3, 1, dtype=F32)}  # fmt: skip
    assert infer({**call, "keys": (9, 4, 1, 7)}) == 0
    assert infer({**call, "keys": (9,)}) == 0
    assert infer({**call, "keys": (9, 4)}) == INVALID
