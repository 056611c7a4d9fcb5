"""torch_npu's attention operators on every device. Ascend 950 has functions of its own: one for
dense and packed sequences, which draws the dropout itself."""

from __future__ import annotations

import cann_simulator
import pytest
import test_torch_npu_operators_fusion_attention as fusion
import test_torch_npu_operators_infer_attention as infer
import torch
import torch_npu
from support.simulated_npu import DEVICE

pytestmark = pytest.mark.usefixtures("no_leak")

ON_950 = DEVICE[0] == "950"


@fusion.each_layout
@fusion.each_version
def test_fusion_attention(version: str, layout: str) -> None:
    if ON_950 and version == "_v3":
        with pytest.raises(RuntimeError, match="Ascend950 not support"):
            fusion.check_fusion(version, layout)
    else:
        fusion.check_fusion(version, layout)


def test_ropes() -> None:
    """Ascend 950 takes these sizes alone."""
    fusion.check_fusion("_v2", "TND", torch.bfloat16, ropes=True, sizes=(128, 64))


def test_dropout() -> None:
    fusion.test_dropout("")


@infer.each_fused
def test_fused(operator: str) -> None:
    infer.check_fused(operator, "BSH", torch.float16)


def test_functions_called() -> None:
    with cann_simulator.recorded_calls() as calls:
        fusion.check_fusion("", "BSH")
        infer.check_fused(infer.FUSED, "BSH", torch.float16)
    names = [x["function"] for x in calls if x.get("phase") == 1 and "Attention" in x["function"]]
    version = {"V4", "GradV4"} if ON_950 else {"", "Grad"}
    expected = {f"aclnnFlashAttentionScore{x}" for x in version}
    assert set(names) == expected | {f"aclnnFusedInferAttentionScore{'V5' if ON_950 else 'V3'}"}


@pytest.mark.skipif(not ON_950, reason="the other devices have these operators")
@pytest.mark.parametrize("name", [infer.PROMPT, infer.INCREMENTAL])
def test_operators_that_950_lacks(name: str) -> None:
    tensors = [x.npu() for x in infer.dense(sq=1)]
    with pytest.raises(RuntimeError, match=f"{name} is no longer supported on Ascend950"):
        getattr(torch_npu, name)(*tensors, **infer.for_inference(name, "BNSD"))
