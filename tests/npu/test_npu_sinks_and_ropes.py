"""Sinks and ropes of dense attention, within the bounds of the reference."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops.check.gradients import (
    differentiable_names,
    incoming_gradients,
    outputs_and_gradients,
)
from support.samples import OPERATORS, Recipe

pytestmark = pytest.mark.usefixtures("no_limits")

OPERATOR = OPERATORS["flash_attention_score"]
EXTENDED = [recipe for recipe in OPERATOR.recipes if recipe.case.is_extended]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", EXTENDED, ids=lambda recipe: recipe.id)
def test_within_the_bounds(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    outputs, gradients = outputs_and_gradients(sample.to("npu"))
    assert all(x.device.type == "npu" for x in (*outputs, *gradients))
    outputs = tuple(x.cpu() for x in outputs)
    OPERATOR.assert_matches_reference(sample, outputs)
    assert OPERATOR.gradient is not None
    assert OPERATOR.gradient.expected is not None
    bounds = OPERATOR.gradient.expected(sample, outputs, *incoming_gradients(sample, outputs))
    expected = dict(zip(OPERATOR.gradient.inputs, bounds, strict=True))
    for name, x in zip(differentiable_names(sample), gradients, strict=True):
        expected[name].check(x.cpu())
