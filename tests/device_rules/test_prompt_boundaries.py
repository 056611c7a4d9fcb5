"""Products that have prompt_flash_attention, and calls that none of them limits."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.check.boundaries.prompt import A2, A3, P950, inputs, merged, meta

OPERATOR = torch.ops.ascend.prompt_flash_attention


def test_950_has_a_function_from_cann_9_0_on() -> None:
    error = "got Ascend 950 with CANN 8.5; ascend_attn_ops.limits"
    with ops.limits("950", cann="8.5"), pytest.raises(NotImplementedError, match=error):
        OPERATOR(**inputs())
    with ops.limits("950", cann="9.0"):
        OPERATOR(**inputs())


@pytest.mark.parametrize("cann", ["8.5", "9.0"])
def test_a3_has_the_function_from_cann_9_1_on(cann: Any) -> None:
    error = f"got Ascend A3 with CANN {cann}; ascend_attn_ops.limits"
    with ops.limits("A3", cann=cann), pytest.raises(NotImplementedError, match=error):
        OPERATOR(**inputs())
    with ops.limits("A3"):
        OPERATOR(**inputs())


@pytest.mark.parametrize("device", [A2, ("A2", "8.5"), A3, P950])
def test_what_no_product_limits(device: tuple[Any, Any]) -> None:
    with ops.limits(*device):
        OPERATOR(**inputs(sq=2**26, skv=2**26))
        OPERATOR(**merged(n=256, d=512))
        scale = {"quant_scale2": meta(1), "quant_offset2": meta(1)}
        assert OPERATOR(**inputs() | scale).dtype == torch.int8
