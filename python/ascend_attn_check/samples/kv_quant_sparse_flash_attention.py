"""Samples of kv_quant_sparse_flash_attention: the forms of sparse_flash_attention over int8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from ascend_attn_ops.reference.call import Sample
from torch import Tensor
from torch.nn.functional import pad

from . import sparse_flash_attention as of_halves
from .randomness import Random
from .record import Operator
from .sparse import Pages, SparseCase, indices, on_device, sized
from .torch_npu_calls import torch_npu

_DEVICE = SparseCase(s=(3, 5), heads=8, d=512, rope=64, k=1024, absorbed=True)

CASES = [
    *(x for x in of_halves.CASES[::2] if x.d != 512),
    *(x for x in of_halves.PAGED_CASES[::2] if x.d != 512 and not x.statistics),
    _DEVICE,
    replace(_DEVICE, lengths=((2, 3), (5, 4))),
    replace(_DEVICE, s=(3, 48), lengths=((1, 3), (48, 33)), page=16, absorbed=False),
    replace(_DEVICE, layout="TND", lengths=((3, 0, 6, 0), (5, 2, 9, 0)), tail=(2, 3), heads=16),
    replace(_DEVICE, layout="TND", lengths=((1, 1, 2), (64, 5, 33)), mode=0, page=32),
]


def tile_of(case: SparseCase) -> int:
    return 128 if case.d == 512 else 24


def packed_rows(latent: Tensor, rope: Tensor, tile: int) -> Tensor:
    """Rows of a cache, with the scales of npu_dynamic_block_quant."""
    size = latent.shape[-1]
    count = -(-size // tile)
    tiles = pad(latent.float(), (0, count * tile - size)).unflatten(-1, (count, tile))
    scales = tiles.abs().amax(-1, keepdim=True) / 127
    numbers = (tiles / scales.clamp(min=1e-30)).round().to(torch.int8).flatten(-2)[..., :size]
    scales = scales.flatten(-2).clone(memory_format=torch.contiguous_format)
    parts = numbers, rope.contiguous().view(torch.int8), scales.view(torch.int8)
    return torch.cat(parts, -1)


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    query = random.normal(*case.tokens(0), case.heads, case.d + case.rope)
    latent, rope = (random.normal(*case.tokens(1), 1, size) for size in (case.d, case.rope))
    key = packed_rows(latent, rope, tile_of(case))
    paged: dict[str, Any] = {}
    if case.page:
        pages = Pages.draw(case, random)
        key = pages.cache(case, key)
        paged = pages.options("layout_kv")
    inputs = {
        "query": query,
        "key": key,
        "value": key if case.absorbed else key[..., : case.d],
        "sparse_indices": indices(case, random),
    }
    options = {
        "scale_value": max(case.d + case.rope, 1) ** -0.5,
        **case.length_options(),
        "sparse_block_size": case.block,
        "layout": case.layout,
        "sparse_mode": case.mode,
        "tile_size": tile_of(case),
        "rope_head_dim": case.rope,
        **paged,
    }
    return Sample("kv_quant_sparse_flash_attention", f"{case.id}-{dtype}", inputs, options)


KV_QUANT_SPARSE_FLASH_ATTENTION = Operator(
    "kv_quant_sparse_flash_attention",
    CASES,
    build,
    inference_only=True,
    on_device=on_device,
    sized=sized(heads=8, d=512, rope=64, block=1),
    torch_npu=lambda x: torch_npu(
        "npu_kv_quant_sparse_flash_attention",
        x,
        value=x["key"],
        layout_kv=x.get("layout_kv") or x["layout"],
        key_quant_mode=2,
        value_quant_mode=2,
        attention_mode=2,
    ),
    takes_dtensors=False,
)

OPERATORS = [KV_QUANT_SPARSE_FLASH_ATTENTION]
