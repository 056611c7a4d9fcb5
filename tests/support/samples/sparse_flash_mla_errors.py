"""Calls that sparse_flash_mla and its gradient must refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from ascend_attn_ops.check.samples.record import Operator
from ascend_attn_ops.check.samples.sample import Sample
from ascend_attn_ops.check.samples.sparse_flash_mla import (
    DEVICE,
    LENGTHS,
    OPERATORS,
    SPARSE_FLASH_MLA,
    SPARSE_FLASH_MLA_GRAD,
    MlaCase,
)
from torch import Tensor

from . import sparse_errors as shared
from .sparse_errors import edited, first_index
from .wrong_call import WrongCall, elsewhere, longer, put

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


def tensor_rules(operator: Operator) -> Iterator[WrongCall]:
    return shared.tensor_rules(operator, (BSND, TND), argument_of_extent)


def option_rules(operator: Operator) -> Iterator[WrongCall]:
    def wrong(argument: str, value: object, case: MlaCase = BSND) -> WrongCall:
        return WrongCall(f"{argument} {value}", operator, case, {argument: value}, argument)

    for layout in ("BNSD", "bsnd", "PA_BSND", ""):
        yield wrong("layout", layout)
    for mode in (-1, 1, 2, 5, 8):
        yield wrong("ori_mask_mode", mode)
    for mode in (-1, 1, 2, 4):
        yield wrong("cmp_mask_mode", mode)
    for ratio in (0, -1, 2**31):
        yield wrong("cmp_ratio", ratio)
    for window in ("ori_win_left", "ori_win_right"):
        yield wrong(window, -2)
    for scale in (math.nan, -math.inf, 1e39):
        yield wrong("scale_value", scale)
    yield WrongCall("indices alone", operator, BSND, {"cmp_kv": None}, "cmp_kv", code="161001")


def value_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong lengths, residuals and indices."""

    def wrong(
        rule: str, case: MlaCase, name: str, change: Callable[[Tensor], object] | list[int],
        argument: str = "", on_meta: bool = False,
    ) -> WrongCall:  # fmt: skip
        change = edited(change) if isinstance(change, list) else change
        return WrongCall(
            f"{case.layout}-{name}-{rule}", operator, case, put(name, change), argument or name,
            on_meta=on_meta,
        )  # fmt: skip

    for side, name in enumerate(LENGTHS):
        given = TND.length_options()[name]
        assert given is not None
        first, second, third = given.tolist()
        tokens = TND.keys(max(side, 1)).tokens(min(side, 1))[0]
        yield wrong("decreasing", TND, name, [second, first, third])
        yield wrong("beyond T", TND, name, [first, second, tokens + 1])
        yield wrong("negative", TND, name, [-1, second, third])
        yield wrong("missing", TND, name, lambda x: None, on_meta=True)
        yield wrong("fewer", TND, name, lambda x: x[:2], r"actual_seq_lengths_\w+", on_meta=True)
        yield wrong("beyond S", COUNTS, name, [COUNTS.s[side] + 1, 3])
        yield wrong("negative", COUNTS, name, [-1, 3])
        yield wrong("too many", COUNTS, name, lambda x: torch.cat((x, x)), on_meta=True)
    residual = replace(COUNTS, residual=(1, 0))
    for values in ([2, 0], [-1, 0]):
        yield wrong(f"residual {values[0]}", residual, "cmp_residual_kv", values)
    yield wrong("residuals", residual, "cmp_residual_kv", lambda x: x[:1], on_meta=True)
    for keys in (3, 20):
        change = put("ori_kv", lambda x, keys=keys: x.repeat(1, 3, 1, 1)[:, :keys])
        yield WrongCall(f"{keys} tokens of 4 keys", operator, BSND, change, "cmp_residual_kv")
    for rule, case, value in (
        ("is Lc", BSND, 4), ("below -1", BSND, -2), ("huge", BSND, 2**31 - 1),
        ("is Lc", TND, 1), ("below -1", TND, -(2**31)),
    ):  # fmt: skip
        yield wrong(f"index-{rule}", case, "cmp_sparse_indices", first_index(value))
    behind = replace(COUNTS, lengths=((5, 3), (6, 4), (3, 2)))
    yield wrong("index-behind the length", behind, "cmp_sparse_indices", first_index(3))


def page_rules() -> Iterator[WrongCall]:
    def wrong(
        rule: str, change: object, argument: str, exception: type[Exception] = ValueError,
        on_meta: bool = True,
    ) -> WrongCall:  # fmt: skip
        return WrongCall(
            f"pages-{rule}", SPARSE_FLASH_MLA, PAGED, change, argument, exception, on_meta=on_meta
        )

    for layout in ("TND", "BNSD", "PA_BBND", ""):
        yield wrong(f"layout_kv {layout!r}", {"layout_kv": layout}, "layout_kv")
    for table, keys, lengths in zip(TABLES, ("ori_kv", "cmp_kv"), LENGTHS[1:], strict=True):
        yield wrong(f"no {table}", {table: None}, table)
        yield wrong(f"no {lengths}", {lengths: None}, lengths)
        yield wrong(f"{table} of rank 1", put(table, lambda x: x[0]), table)
        yield wrong(f"{table} too long", put(table, longer(0)), table)
        yield wrong(f"{table} of int64", put(table, Tensor.long), table, TypeError)
        yield wrong(f"{table} elsewhere", put(table, elsewhere), table, on_meta=False)
        for block in (-1, 2**31 - 1):
            change = put(table, lambda x, block=block: x.clone().fill_(block))
            yield wrong(f"{table} with {block}", change, table, on_meta=False)
        yield wrong(f"{keys} of two heads", put(keys, longer(2)), keys)
        yield wrong(f"{keys} of another size", put(keys, longer(3)), keys)
        yield wrong(f"{keys} without rows", put(keys, lambda x: x[:, :0]), keys)
        yield wrong(f"{lengths} beyond", put(lengths, edited([999, 2])), lengths, on_meta=False)
    yield WrongCall(
        "pages-table of dense keys", SPARSE_FLASH_MLA, BSND,
        {"ori_block_table": torch.zeros(2, 1, dtype=torch.int32)}, "ori_block_table",
    )  # fmt: skip
    for size in (8, 24, 1040):
        case = replace(DEVICE, lengths=((20,), (20,), (5,)), layout="TND", page=size)
        yield WrongCall(
            f"limits-pages of {size}", SPARSE_FLASH_MLA, case, None, r"ori_kv|cmp_kv", limits="A2"
        )


def limit_rules(operator: Operator) -> Iterator[WrongCall]:
    """Calls that are good but for the device."""
    rules: dict[str, tuple[str, dict[str, object]]] = {
        "N1": ("query", {"heads": 3}),
        "D": ("query", {"d": 64}),
        "K": ("cmp_sparse_indices", {"k": 5}),
        "B 0": ("query", {"b": 0}),
        "S2 0": ("query", {"s": (5, 0, 0)}),
        "ori_mask_mode": ("ori_mask_mode", {"mode": 3}),
        "cmp_mask_mode": ("cmp_mask_mode", {"cmp_mode": 0}),
        "left": ("ori_win_left", {"left": 128}),
        "right": ("ori_win_right", {"right": 1}),
        "sink": ("sink", {"sink": False}),
        "ratio of CSA": ("cmp_ratio", {"ratio": 2, "s": (20, 20, 10)}),
        "ratio of HCA": ("cmp_ratio", {"kind": "hca"}),
        "ratio of SWA": ("cmp_ratio", {"kind": "swa"}),
        "counts": (r"actual_seq_lengths\w*", {"lengths": ((20,), (20,), (5,))}),
    }
    for rule, (argument, sizes) in rules.items():
        case = replace(DEVICE, **sizes)
        yield WrongCall(f"limits-{rule}", operator, case, None, argument, limits="A2")
    yield WrongCall(
        "limits-float32", operator, DEVICE, lambda sample: operator.make(DEVICE, torch.float32),
        "query", TypeError, limits="A2",
    )  # fmt: skip
    for product in ("310P", "950"):
        yield WrongCall(
            f"limits-{product}", operator, DEVICE, None, r"\w+", NotImplementedError,
            limits=product,
        )  # fmt: skip


WRONG_CALLS = [
    *(
        row
        for operator in OPERATORS
        for make in (tensor_rules, option_rules, value_rules, limit_rules)
        for row in make(operator)
    ),
    *page_rules(),
    WrongCall(
        "limits-deterministic", SPARSE_FLASH_MLA_GRAD, DEVICE, {"deterministic": True},
        "deterministic", limits="A2",
    ),
]  # fmt: skip
