"""Writes to paged caches by torch_npu's names."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops.npu_operators.kernels import computes


@computes("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    *,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str,
) -> None:
    torch.ops.ascend.scatter_pa_kv_cache_(
        key, key_cache, slot_mapping, value, value_cache, compress_lens=compress_lens,
        compress_seq_offset=compress_seq_offsets, seq_lens=seq_lens, cache_mode=cache_mode,
    )  # fmt: skip


@computes("atb::_npu_reshape_and_cache")
def _npu_reshape_and_cache(
    *, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    torch.ops.ascend.scatter_pa_kv_cache_(key, key_cache, slot_indices, value, value_cache)
