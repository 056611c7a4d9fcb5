"""The checked mode of the NPU, on a machine that has none."""

from __future__ import annotations

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops._value_checks import VARIABLE
from support import fresh
from support.samples import RECIPES
from support.tolerance import assert_same_bits


def test_it_has_no_effect_on_the_cpu() -> None:
    sample = RECIPES[0].make(torch.float32)
    with ops.limits(None):
        expected = sample.call(torch.ops.ascend)
        with ops.check_values():
            assert_same_bits(sample.call(torch.ops.ascend), expected)


@pytest.mark.parametrize("text", ["2", "yes"])
def test_a_wrong_environment_says_so(text: str) -> None:
    result = fresh.run("import ascend_attn_ops", **{VARIABLE: text})
    assert result.status != 0
    last = result.err.strip().splitlines()[-1]
    assert last == f"ValueError: {VARIABLE}={text}: expected 0 or 1"
