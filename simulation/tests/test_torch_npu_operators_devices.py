"""torch_npu's attention operators on every device. Ascend 950 has functions of its own: one for
dense and packed sequences, which draws the dropout itself."""

from __future__ import annotations

from typing import Any

import cann_simulator
import pytest
import test_torch_npu_operators_fusion_attention as dense
import test_torch_npu_operators_infer_attention as infer
import test_torch_npu_operators_packed_attention as packed
import torch
import torch_npu
from support.simulated_npu import DEVICE

pytestmark = pytest.mark.usefixtures("no_leak")

ON_950 = DEVICE[0] == "950"


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("operator", [dense.V1, dense.V2], ids=["v1", "v2"])
def test_dense(operator: Any, layout: str) -> None:
    dense.check_dense(operator, layout, torch.float16, {}, {})


@pytest.mark.parametrize("operator", [packed.V1, packed.V2], ids=["v1", "v2"])
def test_packed(operator: Any) -> None:
    packed.check(operator, torch.float16, {})


def test_v3() -> None:
    if ON_950:
        with pytest.raises(RuntimeError, match="Ascend950 not support"):
            dense.check_dense(dense.V3, "BSH", torch.float16, {}, {})
        return
    dense.check_dense(dense.V3, "BSH", torch.float16, {}, {})
    packed.check(packed.V3, torch.float16, {})


def test_ropes() -> None:
    """Ascend 950 takes these sizes alone."""
    packed.check(packed.V2, torch.bfloat16, {}, with_ropes=True, sizes=(128, 64))


def test_dropout() -> None:
    dense.test_dropout(dense.V1)


@infer.each_fused
def test_fused(operator: Any) -> None:
    infer.test_fused(operator, "BSH", torch.float16)


def test_functions_called() -> None:
    with cann_simulator.recorded_calls() as calls:
        dense.check_dense(dense.V1, "BSH", torch.float16, {}, {})
        infer.test_fused(infer.fused, "BSH", torch.float16)
    names = [x["function"] for x in calls if x.get("phase") == 1 and "Attention" in x["function"]]
    version = {"V4", "GradV4"} if ON_950 else {"", "Grad"}
    expected = {f"aclnnFlashAttentionScore{x}" for x in version}
    assert set(names) == expected | {f"aclnnFusedInferAttentionScore{'V5' if ON_950 else 'V3'}"}


@pytest.mark.skipif(not ON_950, reason="the other devices have these operators")
@pytest.mark.parametrize("name", ["npu_prompt_flash_attention", "npu_incre_flash_attention"])
def test_operators_that_950_lacks(name: str) -> None:
    tensors = [x.npu() for x in infer.dense(torch.float16, sq=1)]
    with pytest.raises(RuntimeError, match=f"{name} is no longer supported on Ascend950"):
        getattr(torch_npu, name)(*tensors, num_heads=infer.N, num_key_value_heads=infer.NK)
