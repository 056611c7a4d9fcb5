"""KvQuantSparseFlashAttention: docs/operators/kv_quant_sparse_flash_attention.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from .sparse_flash_attention import sparse_flash_attention

_SHARED = (
    "sparse_indices", "scale_value", "actual_seq_lengths_query", "actual_seq_lengths_key",
    "sparse_block_size", "layout", "sparse_mode", "layout_kv", "block_table",
)  # fmt: skip


@reference
def kv_quant_sparse_flash_attention(a: Arguments) -> Tensor:
    """Attention of each query over the keys it selects, whose rows are dequantised.

    Returns out, query's shape without the rope, and its dtype.
    """
    out: Tensor = sparse_flash_attention(**dequantised(a))[0]
    return out


def dequantised(a: Arguments) -> dict[str, Any]:
    """The arguments of sparse_flash_attention over the keys that the rows stand for."""
    size = a.query.shape[-1] - a.rope_head_dim
    rope_bytes = a.rope_head_dim * a.query.itemsize
    sizes = [size, rope_bytes, a.key.shape[-1] - size - rope_bytes]
    numbers, rope, scales = a.key.split(sizes, -1)
    by_number = numbers_of(scales, torch.float32).repeat_interleave(a.tile_size, -1)[..., :size]
    latent = rounded(numbers.float() * by_number, a.query.dtype)
    query, query_rope = a.query.split([size, a.rope_head_dim], -1)
    ropes = {"query_rope": query_rope, "key_rope": numbers_of(rope, a.query.dtype)}
    shared = {name: getattr(a, name) for name in _SHARED}
    return {"query": query, "key": latent, "value": latent, **ropes, **shared}


def numbers_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers whose bytes are the rows of a tensor."""
    flat = x.flatten().clone().view(dtype)
    return flat.view(*x.shape[:-1], x.shape[-1] // dtype.itemsize)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a dtype; of two, bfloat16 takes the even one and float16 the larger,
    as the kernels of A2 and A3 do."""
    if dtype != torch.float16:
        return x.to(dtype)
    x = x.double()
    step = torch.ldexp(torch.ones_like(x), (x.frexp().exponent - 11).clamp(min=-24))
    return ((x / step).abs() + 0.5).floor().mul(step).copysign(x).to(dtype)
