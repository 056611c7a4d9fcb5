"""The checked mode of the NPU, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops._value_checks import VARIABLE
from support.samples import RECIPES
from support.tolerance import assert_same_bits
from support.turns import nightly


def test_it_has_no_effect_on_the_cpu() -> None:
    sample = RECIPES[0].make(torch.float32)
    with ops.limits(None):
        expected = sample.call(torch.ops.ascend)
        with ops.check_values():
            assert_same_bits(sample.call(torch.ops.ascend), expected)


@pytest.mark.parametrize("text", ["2", pytest.param("yes", marks=nightly)])
def test_a_wrong_environment_says_so(text: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import ascend_attn_ops"],
        env={**os.environ, VARIABLE: text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last == f"ValueError: {VARIABLE}={text}: expected 0 or 1"
