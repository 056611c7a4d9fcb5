"""Helpers for trainers, on NPU tensors."""

from __future__ import annotations

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from device_samples import as_launched
from support.samples import OPERATORS
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.func import grad, vmap

pytestmark = pytest.mark.usefixtures("no_limits")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", ["lightning_indexer", "sparse_flash_attention", "flash_attention_score"]
)
def test_autocast(name: str) -> None:
    operator = OPERATORS[name]
    sample = as_launched(operator.make(operator.cases[0], torch.float32))
    half = sample.map(lambda x: x.bfloat16() if x.is_floating_point() else x)
    with torch.autocast("npu", torch.bfloat16):
        outputs = sample.to("npu").call(ops)
    assert_same_bits(tuple(x.cpu() for x in outputs), half.call(torch.ops.ascend))


def test_torch_func() -> None:
    x = torch.randn(3, 1, 8, 2, 16, dtype=torch.bfloat16)

    def loss(x: Tensor) -> Tensor:
        return ops.flash_attention_score(x, x, x, num_heads=2, layout="BSND")[0].sum()

    on_npu = vmap(grad(loss))(x.npu()).cpu()
    assert_same_bits((on_npu,), (vmap(grad(loss))(x),))


def attend_in_int8(tensors: list[Tensor], scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
    inputs = ops.quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    out = ops.prompt_flash_attention(**inputs._asdict(), num_heads=4, layout="BNSD", sparse_mode=3)
    return (*inputs, out)


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint64], ids=str)
def test_quantised_attention(scale_dtype: torch.dtype) -> None:
    """The device's int8 attention, as on the CPU to the last bit."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 4, 50, 32, generator=generator, dtype=torch.bfloat16) for _ in range(3)
    ]
    on_npu = [x.npu() for x in tensors]
    with cann_simulator.recorded_calls() as calls:
        results = attend_in_int8(on_npu, scale_dtype)
    functions = [call["function"] for call in calls if call.get("phase") == 1]
    assert functions == ["aclnnPromptFlashAttentionV3"]
    assert {x.device.type for x in results} == {"npu"}
    assert_same_bits(tuple(x.cpu() for x in results), attend_in_int8(tensors, scale_dtype))
