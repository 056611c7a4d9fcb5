"""Calls that the rules of some devices for flash_attention_score refuse, and others take."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.check.boundaries.dense import BOUNDARIES, Boundary, FlashCase, arguments


def call(operator: str, case: FlashCase, change: dict[str, Any]) -> None:
    getattr(torch.ops.ascend, operator)(**arguments(operator, case, change))


@pytest.mark.parametrize("row", [x for x in BOUNDARIES if x.others], ids=lambda row: row.name)
def test_other_devices_take_the_call(row: Boundary) -> None:
    for operator in row.operators:
        for product, cann in row.others:
            with ascend_attn_ops.limits(product, cann):  # type: ignore[arg-type]
                call(operator, row.case, row.refused)


@pytest.mark.parametrize("mode", [None, 3])
def test_the_launch_closes_padded_packs(mode: int | None) -> None:
    """So that no device refuses one."""
    case = FlashCase(layout="TND", lengths=((3, 4), (5, 6)), tail=(1, 2), mode=mode)
    for product, cann in (("A2", "9.1"), ("A3", "9.0"), ("A2", "8.5"), ("950", "9.1")):
        with ascend_attn_ops.limits(product, cann):  # type: ignore[arg-type]
            call("flash_attention_score", case, {})
