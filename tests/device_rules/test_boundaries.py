"""Both sides of each rule of the limits, with the text of the error, and that none is missing."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check import boundaries
from ascend_attn_check.boundaries import Rule
from ascend_attn_ops._core.device_limits import table

LIFTED = (
    "; on the CPU ascend_attn_ops.set_limits(None), or a block of limits(None), lifts the device's "
    "limits [ACLNN_ERR_PARAM_INVALID 161002]"
)
RULES = list(boundaries.rules())
# Every rule of these has a boundary, on each product that CANN 9.1 has them on.
WHOLE = (
    "sparse_flash_mla", "sparse_flash_mla_grad", "sparse_lightning_indexer_kl_loss_grad",
    "fused_infer_attention_score",
)  # fmt: skip


def errors(rule: Rule, product: str, cann: str) -> list[str]:
    """Returns what the error may be: some name the version of CANN."""
    name, text = f"Ascend {product}", f"ascend::{rule.operator}: {rule.text}{LIFTED}"
    text = text.replace("{}", name).replace("{v}", f"{name} with CANN {cann}")
    return [text.replace("{device}", x) for x in (name, f"{name} with CANN {cann}")]


def call(rule: Rule, arguments: dict[str, Any], *device: Any) -> None:
    with ascend_attn_ops.limits(*device):
        getattr(torch.ops.ascend, rule.operator)(**arguments)


@pytest.mark.parametrize(
    "rule", RULES,
    ids=[f"{x.operator}-{x.devices[0]}-{x.text.split(':')[0]}-{i}" for i, x in enumerate(RULES)],
)  # fmt: skip
def test_both_sides_of_a_rule(rule: Rule) -> None:
    for device in rule.devices:
        product, cann = device.split(":")
        call(rule, rule.inside(), product, cann)
        with pytest.raises((TypeError, ValueError)) as error:
            call(rule, rule.outside(), product, cann)
        assert str(error.value) in errors(rule, product, cann)
        assert isinstance(error.value, TypeError) == rule.text.startswith(
            ("weights: expected", "query: expected bfloat16")
        )
    call(rule, rule.outside(), None)


DEVICES = [
    (row["operator"], *device, limits)
    for row in table()
    if row["operator"] in WHOLE
    for device, limits in row["devices"].items()
    if device[1] == "9.1"
]


@pytest.mark.parametrize(
    ("operator", "product", "cann", "limits"), DEVICES, ids=[f"{x[0]}-{x[1]}" for x in DEVICES]
)
def test_every_rule_has_a_boundary(
    operator: str, product: str, cann: str, limits: dict[str, Any]
) -> None:
    device = f"{product}:{cann}"
    texts = [x.text for x in RULES if x.operator == operator and device in x.devices]
    expected = [f"{name} ({meaning}) to be {values}" for name, meaning, values in limits["limits"]]
    expected += [rule for _, rule in limits["rules"]]
    assert [x for x in expected if not any(f"expected {x}" in text for text in texts)] == []
