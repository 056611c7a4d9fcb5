"""From bfloat16 NPU tensors to the device's int8 attention, as on the CPU to the last bit."""

from __future__ import annotations

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits", "no_leak")


def attend(tensors: list[Tensor], scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
    inputs = ascend_attn_ops.quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    out = ascend_attn_ops.prompt_flash_attention(
        **inputs._asdict(), num_heads=4, layout="BNSD", sparse_mode=3
    )
    return (*inputs, out)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint64], ids=str)
def test_quantised_attention(scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 4, 50, 32, generator=generator, dtype=torch.bfloat16) for _ in range(3)
    ]
    on_npu = [x.npu() for x in tensors]
    with cann_simulator.recorded_calls() as calls:
        results = attend(on_npu, scale_dtype)
    functions = [call["function"] for call in calls if call.get("phase") == 1]
    assert functions == ["aclnnPromptFlashAttentionV3"]
    assert {x.device.type for x in results} == {"npu"}
    assert_same_bits(tuple(x.cpu() for x in results), attend(tensors, scale_dtype))
