"""Calls on both sides of each rule that devices have for flash_attention_score."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.check.boundaries.dense import BOUNDARIES, Boundary, FlashCase, arguments


def call(operator: str, case: FlashCase, change: dict[str, Any]) -> None:
    getattr(torch.ops.ascend, operator)(**arguments(operator, case, change))


@pytest.mark.parametrize("row", BOUNDARIES, ids=lambda row: row.name)
def test_both_sides_of_a_rule(row: Boundary) -> None:
    for operator in row.operators:
        for product, cann in row.devices:
            device = f"Ascend {product}" + (f" with CANN {cann}" if row.of_version else "")
            error = (
                f"ascend::{operator}: {row.argument}: expected "
                f"{row.expected.format(device=device)};"
                " on the CPU ascend_attn_ops.limits(None) lifts the device's limits"
                " [ACLNN_ERR_PARAM_INVALID 161002]"
            )
            with ascend_attn_ops.limits(product, cann):  # type: ignore[arg-type]
                with pytest.raises(ValueError, match=row.argument) as raised:
                    call(operator, row.case, row.refused)
                assert str(raised.value) == error
                call(operator, row.case, row.accepted)
        for product, cann in row.others:
            with ascend_attn_ops.limits(product, cann):  # type: ignore[arg-type]
                call(operator, row.case, row.refused)
        with ascend_attn_ops.limits(None):
            call(operator, row.case, row.refused)


@pytest.mark.parametrize("mode", [None, 3])
def test_the_launch_closes_padded_packs(mode: int | None) -> None:
    """So that no device refuses one."""
    case = FlashCase(layout="TND", lengths=((3, 4), (5, 6)), tail=(1, 2), mode=mode)
    for product, cann in (("A2", "9.1"), ("A3", "9.0"), ("A2", "8.5"), ("950", "9.1")):
        with ascend_attn_ops.limits(product, cann):  # type: ignore[arg-type]
            call("flash_attention_score", case, {})
