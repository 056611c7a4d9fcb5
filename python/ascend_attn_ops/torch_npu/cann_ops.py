"""DeepSeek-V4's operators by the names of cann_ops_transformer and of vLLM-Ascend.

Their lengths are cumulative with a leading 0 in a pack, and counts of the sequences otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.packing import ends_of
from ascend_attn_ops.torch_npu.translation import unsupported

_METADATA_SIZE = 1024
_PAGED = {"PA_BBND": "PA_BSND", "PA_ND": "PA_BSND"}


def metadata(name: str, device: str | None = None, **arguments: Any) -> Tensor:
    """How a device divides the work of the call that takes it. Nothing reads it here."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    place = tensors[0].device if tensors else device
    return torch.zeros(_METADATA_SIZE, dtype=torch.int32, device=place)


def indexer(
    name: str, query: Tensor, key: Tensor, weights: Tensor, layout: str, layout_key: str,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_q: Tensor | None,
    seqused_k: Tensor | None, return_values: int, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.ops.ascend.lightning_indexer(
        query, key, weights, layout=layout, layout_key=_PAGED.get(layout_key, layout_key),
        actual_seq_lengths_query=_lengths(name, "q", layout, cu_seqlens_q, seqused_q),
        actual_seq_lengths_key=_lengths(name, "k", layout_key, cu_seqlens_k, seqused_k),
        return_values=bool(return_values), **options,
    )  # fmt: skip


def attention(
    name: str, layout: str, layout_kv: str, cmp_kv: Tensor | None, cmp_ratio: int,
    cu_seqlens_q: Tensor | None, cu_seqlens_ori_kv: Tensor | None, cu_seqlens_cmp_kv: Tensor | None,
    seqused_q: Tensor | None, seqused_ori_kv: Tensor | None = None,
    seqused_cmp_kv: Tensor | None = None, seqused_kv: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if seqused_kv is not None:
        seqused_ori_kv = seqused_kv
    if layout_kv in _PAGED and cmp_kv is not None and seqused_cmp_kv is None:
        seqused_cmp_kv = None if seqused_ori_kv is None else seqused_ori_kv // max(cmp_ratio, 1)
    return torch.ops.ascend.sparse_flash_mla(
        **options, cmp_kv=cmp_kv, cmp_ratio=cmp_ratio,
        actual_seq_lengths_query=_lengths(name, "q", layout, cu_seqlens_q, seqused_q),
        actual_seq_lengths_ori_kv=_lengths(
            name, "ori_kv", layout_kv, cu_seqlens_ori_kv, seqused_ori_kv
        ),
        actual_seq_lengths_cmp_kv=_lengths(
            name, "cmp_kv", layout_kv, cu_seqlens_cmp_kv, seqused_cmp_kv
        ),
        layout=layout, layout_kv=_PAGED.get(layout_kv, layout_kv),
    )  # fmt: skip


def attention_grad(
    name: str, layout: str, layout_kv: str, cu_seqlens_q: Tensor | None,
    cu_seqlens_ori_kv: Tensor | None, cu_seqlens_cmp_kv: Tensor | None, seqused_q: Tensor | None,
    seqused_ori_kv: Tensor | None, seqused_cmp_kv: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients, the probabilities of selected original keys, of which there are none, and of
    selected compressed ones."""
    _check_same_layout(name, "layout_kv", layout, layout_kv)
    *gradients, probabilities = torch.ops.ascend.sparse_flash_mla_grad(
        **options, layout=layout,
        actual_seq_lengths_query=_lengths(name, "q", layout, cu_seqlens_q, seqused_q),
        actual_seq_lengths_ori_kv=_lengths(
            name, "ori_kv", layout_kv, cu_seqlens_ori_kv, seqused_ori_kv
        ),
        actual_seq_lengths_cmp_kv=_lengths(
            name, "cmp_kv", layout_kv, cu_seqlens_cmp_kv, seqused_cmp_kv
        ),
    )  # fmt: skip
    return *gradients, probabilities.new_empty(0), probabilities


def loss_grad(
    name: str, layout: str, layout_key: str, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, seqused_q: Tensor | None, seqused_k: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_same_layout(name, "layout_k", layout, layout_key)
    return torch.ops.ascend.sparse_lightning_indexer_kl_loss_grad(
        actual_seq_lengths_query=_lengths(name, "q", layout, cu_seqlens_q, seqused_q),
        actual_seq_lengths_key=_lengths(name, "k", layout, cu_seqlens_k, seqused_k),
        layout=layout, **options,
    )  # fmt: skip


def _lengths(
    name: str, of: str, layout: str, cu_seqlens: Tensor | None, seqused: Tensor | None
) -> Tensor | None:
    """Our lengths: ends in a pack, counts otherwise, where cumulative ones have no effect."""
    if layout != "TND":
        return seqused
    if seqused is not None:
        raise unsupported(name, f"seqused_{of}", "None in layout TND", seqused)
    return None if cu_seqlens is None else ends_of(name, f"cu_seqlens_{of}", cu_seqlens)


def _check_same_layout(name: str, argument: str, layout: str, other: str) -> None:
    if layout != other:
        raise unsupported(name, argument, f"layout_q, {layout}", other)
