"""Calls that sparse_flash_mla and its gradient must refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_check.samples.record import Operator
from ascend_attn_check.samples.sparse_flash_mla import (
    DEVICE,
    LENGTHS,
    OPERATORS,
    SPARSE_FLASH_MLA,
    SPARSE_FLASH_MLA_GRAD,
    MlaCase,
)
from ascend_attn_ops.reference.call import Sample

from . import sparse_errors as shared
from .sparse_errors import edited, first_index
from .wrong_call import WrongCall, wrong_call

BSND = MlaCase(b=2, s=(9, 9, 4), heads=8)
TND = MlaCase(layout="TND", lengths=((3, 2, 4), (3, 2, 5), (1, 1, 2)), tail=(1, 2, 1), heads=8)
COUNTS = MlaCase(s=(5, 9, 4), lengths=((5, 3), (7, 4), (3, 2)))
PAGED = MlaCase(lengths=((5, 3), (7, 4), (3, 2)), page=16)
TABLES = ("ori_block_table", "cmp_block_table")


def argument_of_extent(good: Sample, name: str, axis: int) -> str:
    if name.endswith("_kv") and good.tensors[name].dim() > 1 and axis == -3:
        return ""
    if name == "cmp_sparse_indices" and axis == -1:
        return ""
    return r"\w+" if name == "query" or name in LENGTHS else name


def option_rules(operator: Operator) -> Iterator[WrongCall]:
    for name, values in (
        ("layout", ("BNSD", "bsnd", "PA_BSND", "")), ("ori_mask_mode", (-1, 1, 2, 5, 8)),
        ("cmp_mask_mode", (-1, 1, 2, 4)), ("cmp_ratio", (0, -1, 2**31)), ("ori_win_left", (-2,)),
        ("ori_win_right", (-2,)), ("scale_value", (math.nan, -math.inf, 1e39)),
    ):  # fmt: skip
        for value in values:
            yield wrong_call(operator, BSND, id=value, **{name: value})
    yield wrong_call(operator, BSND, code="161001", cmp_kv=None)


def value_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong lengths, residuals and indices."""
    wrong = partial(wrong_call, operator)
    on_device = partial(wrong, on_meta=False)
    for side, name in enumerate(LENGTHS):
        given = TND.length_options()[name]
        assert given is not None
        first, second, third = given.tolist()
        tokens = TND.keys(max(side, 1)).tokens(min(side, 1))[0]
        for values in ([second, first, third], [first, second, tokens + 1], [-1, second, third]):
            yield on_device(TND, id=values, **{name: edited(values)})
        yield wrong(TND, **{name: None})
        yield wrong(TND, r"actual_seq_lengths_\w+: ", **{name: lambda x: x[:2]})
        for values in ([COUNTS.s[side] + 1, 3], [-1, 3]):
            yield on_device(COUNTS, id=values, **{name: edited(values)})
        yield wrong(COUNTS, id="too many", **{name: lambda x: torch.cat((x, x))})
    residual = replace(COUNTS, residual=(1, 0))
    for values in ([2, 0], [-1, 0]):
        yield on_device(residual, id=values, cmp_residual_kv=edited(values))
    yield wrong(residual, cmp_residual_kv=lambda x: x[:1])
    for keys in (3, 20):
        tokens = {"ori_kv": lambda x, keys=keys: x.repeat(1, 3, 1, 1)[:, :keys]}
        yield wrong(BSND, "cmp_residual_kv: ", id=keys, **tokens)
    behind = replace(COUNTS, lengths=((5, 3), (6, 4), (3, 2)))
    for case, value in (
        (BSND, 4), (BSND, -2), (BSND, 2**31 - 1), (TND, 1), (TND, -(2**31)), (behind, 3),
    ):  # fmt: skip
        yield on_device(case, id=value, cmp_sparse_indices=first_index(value))


def page_rules() -> Iterator[WrongCall]:
    wrong = partial(wrong_call, SPARSE_FLASH_MLA, PAGED)
    for layout in ("TND", "BNSD", "PA_BBND", ""):
        yield wrong(id=layout, layout_kv=layout)
    for table, keys, lengths in zip(TABLES, ("ori_kv", "cmp_kv"), LENGTHS[1:], strict=True):
        yield from shared.table_rules(wrong, (-1, 2**31 - 1), table, keys, lengths)
        yield wrong(id="without rows", **{keys: lambda x: x[:, :0]})
        yield wrong(id="beyond", on_meta=False, **{lengths: edited([999, 2])})
    table = torch.zeros(2, 1, dtype=torch.int32)
    yield wrong_call(SPARSE_FLASH_MLA, BSND, ori_block_table=table)
    for size in (8, 24, 1040):
        case = replace(DEVICE, lengths=((20,), (20,), (5,)), layout="TND", page=size)
        yield wrong_call(SPARSE_FLASH_MLA, case, "ori_kv|cmp_kv: ", id=size, limits="A2")


LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("query", {"heads": 3}), ("query", {"d": 64}), ("cmp_sparse_indices", {"k": 5}),
    ("query", {"b": 0}), ("query", {"s": (5, 0, 0)}), ("ori_mask_mode", {"mode": 3}),
    ("cmp_mask_mode", {"cmp_mode": 0}), ("ori_win_left", {"left": 128}),
    ("ori_win_right", {"right": 1}), ("sink", {"sink": False}),
    ("cmp_ratio", {"ratio": 2, "s": (20, 20, 10)}), ("cmp_ratio", {"kind": "hca"}),
    ("cmp_ratio", {"kind": "swa"}), (r"actual_seq_lengths\w*", {"lengths": ((20,), (20,), (5,))}),
]  # fmt: skip


def rules(operator: Operator) -> Iterator[WrongCall]:
    yield from shared.tensor_rules(operator, (BSND, TND), argument_of_extent)
    yield from option_rules(operator)
    yield from value_rules(operator)
    yield from shared.size_rules(operator, DEVICE, LIMITS)
    yield wrong_call(operator, DEVICE, r"\w+: ", NotImplementedError, limits="950")


WRONG_CALLS = [
    *(row for operator in OPERATORS for row in rules(operator)), *page_rules(),
    wrong_call(SPARSE_FLASH_MLA_GRAD, DEVICE, deterministic=True, limits="A2"),
]  # fmt: skip
