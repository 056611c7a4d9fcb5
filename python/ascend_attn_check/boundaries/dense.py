"""Calls on both sides of each rule that devices have for flash_attention_score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.reference.call import LENGTHS_ON_HOST

from ascend_attn_check.samples.flash_attention_score import FlashCase, build, build_grad

from .rule import Rule

FORWARD, GRADIENT = "flash_attention_score", "flash_attention_score_grad"
BOTH = (FORWARD, GRADIENT)
ATLAS = (("A2", "9.1"), ("A3", "9.1"), ("A2", "8.5"))
P950 = (("950", "9.1"),)
EVERYWHERE = (*ATLAS, *P950)

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
TND = FlashCase(layout="TND", lengths=((3, 4), (5, 6)), heads=(2, 2), d=(8, 8))
PADDED = replace(TND, tail=(1, 2), mode=1, mask="B1")
BAND = replace(TND, mode=4, pre=3, next=2)
MODE_7 = replace(TND, mode=7, pre=6, next=-1)
MODE_8 = replace(TND, mode=8, pre=9, next=2, lengths=((3, 4), (5, 4)))
SLOPES = replace(TND, pse="N", pse_type=2)
# One sequence per token.
SINGLE = replace(TND, lengths=((1,) * 2049, (1,) * 2049), heads=(1, 1))
SINGLE_PREFIX = replace(
    SINGLE, lengths=((1,) * 1001, (1,) * 1001), mode=6, prefix=(1,) * 1001, pre=0, next=0
)
ROWS = FlashCase(b=1, s=(1030, 1030), heads=(1, 1), d=(8, 8), pse="rows", mode=0, mask="")


@dataclass(frozen=True)
class Boundary:
    """A call that some devices refuse, and what makes it one that they take."""

    name: str
    case: FlashCase
    refused: dict[str, Any]
    accepted: dict[str, Any]
    argument: str
    expected: str
    operators: tuple[str, ...] = BOTH
    devices: tuple[tuple[str, str], ...] = EVERYWHERE
    # Where the refused call is taken.
    others: tuple[tuple[str, str], ...] = ()
    # Whether the error names the version of CANN.
    of_version: bool = False


BOUNDARIES = [
    Boundary(
        "padded packs", PADDED, {},
        {
            LENGTHS[0]: [3, 7, 0], LENGTHS[1]: [5, 11, 0],
            "atten_mask": torch.zeros(3, 1, 4, 6, dtype=torch.bool),
        },
        "actual_seq_lengths_query",
        "both lists of lengths to end with 0 (100, 200, 0) where query and key have padding rows "
        "beside slopes or a mask of every sequence on {device}, got 7 of T1 = 8 and 11 of T2 = 13",
        (FORWARD,), (("A2", "9.1"), ("A2", "9.0"), ("A3", "9.1")),
        (("A2", "8.5"), ("950", "9.1")), of_version=True,
    ),
    Boundary(
        "many sequences", SINGLE, {}, {name: list(range(2, 2050)) for name in LENGTHS},
        "actual_seq_lengths_query",
        "sequences (of a pack, its closing 0, or a padded batch) to be 0..2048 on {device}, got "
        "2049; divide them among calls",
    ),
    Boundary(
        "many sequences with prefix", SINGLE_PREFIX, {},
        {**{name: list(range(2, 1002)) for name in LENGTHS}, "prefix": [1] * 1000},
        "actual_seq_lengths_query",
        "sequences with prefix (of the same in sparse_mode 6) to be 0..1000 on {device}, got 1001; "
        "divide them among calls",
    ),
    Boundary(
        "pse_type 0 without pse", TND, {"pse_type": 0}, {"pse_type": 1}, "pse_shift",
        "a tensor for pse_type 0 on {device}, got None", BOTH, ATLAS, P950,
    ),
    Boundary(
        "one bias for all batches", FlashCase(b=3, s=(6, 9), heads=(2, 2), pse="key"), {},
        {"pse_shift": torch.ones(3, 2, 1, 9)}, "pse_shift",
        "(B, N, 1, Skv) instead of (1, N, 1, Skv) for a batch size B > 1 on {device}, "
        "got [1, 2, 1, 9] for B = 3", (GRADIENT,),
    ),
    Boundary(
        "causal by its tokens", ROWS, {"next_tokens": 1}, {"next_tokens": 0}, "next_tokens",
        "0, and pre_tokens of at least Sq, for sparse_mode 0 beside the pse_shift of 1024 rows on "
        "{device}, got 1 and pre_tokens 2147483647", BOTH, ATLAS, P950,
    ),
    Boundary(
        "as many keys as queries in mode 3", replace(TND, mode=3),
        {LENGTHS[0]: [4, 7], LENGTHS[1]: [3, 11]},
        {LENGTHS[0]: [3, 7], LENGTHS[1]: [3, 11]}, "sparse_mode",
        "no sequence with more queries than keys for sparse_mode 3 in layout TND on {device}, "
        "got Sq = 4, Skv = 3 at 0", (FORWARD,), P950, ATLAS,
    ),
    Boundary(
        "a band of later keys", BAND, {"pre_tokens": -1}, {"pre_tokens": 0}, "pre_tokens",
        "at least 0 for sparse_mode 4 in layout TND on {device}, got -1", BOTH, ATLAS,
    ),
    Boundary(
        "a band of later keys on 950",
        FlashCase(s=(6, 9), mode=4, pre=3, next=2, heads=(2, 2), d=(8, 8)),
        {"pre_tokens": -1}, {"pre_tokens": 0}, "pre_tokens",
        "at least 0 for sparse_mode 4 on {device}, got -1", (FORWARD,), P950, ATLAS,
    ),
    Boundary(
        "a band for every query", replace(BAND, lengths=((5, 4), (3, 6))), {"next_tokens": 1},
        {"next_tokens": 2}, "next_tokens",
        "at least Sq - Skv of every sequence for sparse_mode 4 in layout TND on {device}, "
        "got 1 for Sq = 5, Skv = 3 at 0", (FORWARD,), P950, ATLAS,
    ),
    Boundary(
        "as many keys as queries in mode 7", MODE_7, {LENGTHS[0]: [4, 7], LENGTHS[1]: [3, 9]},
        {LENGTHS[0]: [4, 7], LENGTHS[1]: [4, 10]}, "sparse_mode",
        "no sequence with more queries than keys for sparse_mode 7 on {device}, "
        "got Sq = 4, Skv = 3 at 0",
    ),
    Boundary(
        "a band for every query in mode 7", MODE_7, {"next_tokens": -3}, {"next_tokens": -2},
        "next_tokens",
        "at least Sq - Skv of the last sequence for sparse_mode 7 on {device}, "
        "got -3 for Sq = 4, Skv = 6",
    ),
    Boundary(
        "the gradient without a mask", FlashCase(s=(6, 9), heads=(2, 2), d=(8, 8)),
        {"pre_tokens": -(2**31), "next_tokens": 2**31 - 1},
        {"pre_tokens": -(2**31) + 1, "next_tokens": 2**63 - 1}, "pre_tokens",
        "pre_tokens + next_tokens of at least 0, also without an atten_mask on {device}, "
        "got -2147483648 + 2147483647", (GRADIENT,), ATLAS, P950,
    ),
    Boundary(
        "the gradient of packs", BAND, {"pre_tokens": 0, "next_tokens": 0},
        {"pre_tokens": 1, "next_tokens": 0}, "pre_tokens",
        "pre_tokens + next_tokens of at least 1 for sparse_mode 0 and 4 in layout TND on {device}, "
        "got 0 + 0", (GRADIENT,), ATLAS, P950,
    ),
    Boundary(
        "slopes in mode 7", replace(MODE_7, pse="N", pse_type=3, lengths=((3, 4), (3, 4)), next=0),
        {}, {"pse_type": 1, "pse_shift": torch.ones(2 * 7)}, "pse_type",
        "0 or 1 for sparse_mode 7 on {device}, got 3",
    ),
    Boundary(
        "slopes of later sequences in mode 8",
        replace(MODE_8, pse="N", pse_type=2, lengths=((3, 4), (3, 5))),
        {}, {LENGTHS[0]: [2, 7], LENGTHS[1]: [3, 8], "q_start_idx": [1], "kv_start_idx": [0]},
        "pse_type",
        "0 or 1 for sparse_mode 8, unless every sequence after the first has Sq = Skv on {device}, "
        "got 2 with Sq = 4, Skv = 5 at 1", BOTH, ATLAS,
    ),
    Boundary(
        "slopes of the band in mode 8", replace(MODE_8, pse="N", pse_type=2), {},
        {"q_start_idx": [2], "kv_start_idx": [0]}, "q_start_idx",
        "Sq + q_start_idx = Skv + kv_start_idx in the first sequence for pse_type 2 and 3 in "
        "sparse_mode 8 on {device}, got 3 + 0 and 5 + 0", BOTH, ATLAS,
    ),
    Boundary(
        "slopes on 950", SLOPES, {}, {LENGTHS[0]: [3, 7], LENGTHS[1]: [3, 7]}, "pse_type",
        "0 or 1, unless every sequence in layout TND has Sq = Skv on {device}, "
        "got 2 with Sq = 3, Skv = 5 at 0", BOTH, P950, ATLAS,
    ),
    Boundary(
        "queries without keys on 950", TND, {LENGTHS[1]: [0, 11]}, {}, "actual_seq_lengths_key",
        "a key for every sequence with queries in layout TND on {device}, "
        "got Sq = 3, Skv = 0 at 0", BOTH, P950, ATLAS,
    ),
    Boundary(
        "dropout in the gradient of 950",
        FlashCase(s=(6, 9), heads=(2, 2), d=(8, 8), keep_prob=0.5), {},
        {"drop_mask": None, "keep_prob": 1.0}, "drop_mask",
        "None in the gradient on {device}, got [27]", (GRADIENT,), P950, ATLAS,
    ),
    Boundary(
        "head size", FlashCase(b=1, s=(2, 3), heads=(1, 1), d=(769, 8)), {},
        {"query": torch.ones(1, 1, 2, 768), "key": torch.ones(1, 1, 3, 768)}, "query",
        "D (head size) to be 1..768 on {device}, got 769", (FORWARD,),
    ),
    Boundary(
        "head size with a rope", FlashCase(b=1, s=(2, 3), heads=(1, 1), d=(512, 512), rope=257), {},
        {"query_rope": torch.ones(1, 1, 2, 256), "key_rope": torch.ones(1, 1, 3, 256)},
        "query_rope", "D (head size) to be 1..768 on {device}, got 769", (FORWARD,),
    ),
]  # fmt: skip


def arguments(operator: str, case: FlashCase, change: dict[str, Any]) -> dict[str, Any]:
    """On meta tensors, whose dtypes follow query's; lengths stay on the host."""
    with limits(None):
        sample = (build if operator == FORWARD else build_grad)(case, torch.bfloat16)
    given = {}
    for name, x in {**sample.arguments, **change}.items():
        is_number = name in change and isinstance(x, torch.Tensor) and x.is_floating_point()
        given[name] = x.to(torch.bfloat16) if is_number else x
    return {
        name: x.to("meta") if isinstance(x, torch.Tensor) and name not in LENGTHS_ON_HOST else x
        for name, x in given.items()
    }


def rules() -> Iterator[Rule]:
    for row in BOUNDARIES:
        for operator in row.operators:
            yield Rule(
                operator, f"{row.argument}: expected {row.expected}",
                tuple(f"{product}:{cann}" for product, cann in row.devices),
                partial(arguments, operator, row.case, row.accepted),
                partial(arguments, operator, row.case, row.refused),
            )  # fmt: skip
