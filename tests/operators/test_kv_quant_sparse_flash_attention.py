"""kv_quant_sparse_flash_attention: how a row of the cache becomes numbers."""

from __future__ import annotations

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor


def one_key(numbers: Tensor, scales: list[float], dtype: torch.dtype, value: Tensor) -> Tensor:
    """The output where a single key has all the weight: its latent part."""
    rope = torch.zeros(64, dtype=dtype).view(torch.int8)
    row = torch.cat((numbers, rope, torch.tensor(scales).view(torch.int8))).view(1, 1, 1, -1)
    query = torch.ones(1, 1, 8, 576, dtype=dtype)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    out = ops.kv_quant_sparse_flash_attention(query, row, value, indices, scale_value=0.1)
    assert torch.equal(out, out[:, :, :1].expand_as(out))
    return out[0, 0, 0]


@pytest.mark.parametrize("value", [torch.zeros(0), torch.full((2, 3), -1)])
def test_rounding(value: Tensor) -> None:
    """Halfway between two numbers bfloat16 is even, and float16 the one farther from zero."""
    numbers = torch.zeros(512, dtype=torch.int8)
    numbers[:4] = torch.tensor([1, -3, 127, 0])
    numbers[128], numbers[256], numbers[384] = 1, -1, 1
    bfloat16 = one_key(numbers, [1 + 2**-8, 1e30, 1e-30, 0.1], torch.bfloat16, value)
    assert bfloat16[:4].tolist() == [1, -3.015625, 127.5, 0]
    assert bfloat16[[128, 256]].tolist() == torch.tensor([1e30, -1e-30]).bfloat16().tolist()
    float16 = one_key(numbers, [1 + 2**-11, 65519, 1.5 * 2**-24, 2**-25], torch.float16, value)
    assert float16[:4].tolist() == [1 + 2**-10, -3 - 2**-9, 127.0625, 0]
    assert float16[[128, 256, 384]].tolist() == [65504, -(2**-23), 2**-24]
