"""npu_sparse_flash_attention, npu_lightning_indexer and the KL loss, by torch_npu's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_attn_ops._operators import ALL_TOKENS_SPARSE
from ascend_attn_ops.npu_operators.kernels import computes, unsupported

# Absorbed latent attention, the mode that has ropes and one head of keys.
_ABSORBED = 2
_PAGED = "PA_BSND"


@computes("npu_sparse_flash_attention", differentiable=True)
def npu_sparse_flash_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu::npu_sparse_flash_attention"
    value = _given_value(name, value)
    _absorbed(name, attention_mode)
    wants_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, query_rope, key, value, key_rope)
    )
    if wants_gradient and not return_softmax_lse:
        raise ValueError(
            f"{name}: return_softmax_lse: expected True where a gradient is wanted, whose backward "
            "reads the statistics, got False"
        )
    if layout_kv != _PAGED:
        _one_layout(name, "layout_kv", layout_query, layout_kv, block_table)
    elif return_softmax_lse:
        raise unsupported(name, "return_softmax_lse", f"False beside layout_kv {_PAGED}", True)
    return torch.ops.ascend.sparse_flash_attention(
        query, key, value, sparse_indices, scale_value=scale_value,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_kv, query_rope=query_rope, key_rope=key_rope,
        sparse_block_size=sparse_block_size, layout=layout_query, sparse_mode=sparse_mode,
        pre_tokens=pre_tokens, next_tokens=next_tokens, layout_key=layout_kv,
        block_table=block_table, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


@computes("npu_sparse_flash_attention_grad")
def npu_sparse_flash_attention_grad(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
) -> tuple[Tensor, ...]:
    name = "npu::npu_sparse_flash_attention_grad"
    _absorbed(name, attention_mode)
    return torch.ops.ascend.sparse_flash_attention_grad(
        query, key, _given_value(name, value), sparse_indices, d_out, out, softmax_max, softmax_sum,
        scale_value=scale_value, sparse_block_size=sparse_block_size, query_rope=query_rope,
        key_rope=key_rope, actual_seq_lengths_query=actual_seq_qlen,
        actual_seq_lengths_key=actual_seq_kvlen, layout=layout, sparse_mode=sparse_mode,
        pre_tokens=pre_tokens, next_tokens=next_tokens,
    )  # fmt: skip


@computes("npu_lightning_indexer", differentiable=True)
def npu_lightning_indexer(
    *,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    return_value: bool,
) -> tuple[Tensor, Tensor]:
    name = "npu::npu_lightning_indexer"
    if layout_key != _PAGED:
        _one_layout(name, "layout_key", layout_query, layout_key, block_table)
    elif return_value:
        raise unsupported(name, "return_value", f"False beside layout_key {_PAGED}", True)
    return torch.ops.ascend.lightning_indexer(
        query, key, weights, actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key, layout=layout_query,
        sparse_count=sparse_count, sparse_mode=sparse_mode, pre_tokens=pre_tokens,
        next_tokens=next_tokens, return_values=return_value, layout_key=layout_key,
        block_table=block_table,
    )  # fmt: skip


@computes("npu_lightning_indexer_grad")
def npu_lightning_indexer_grad(
    *,
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _all_tokens("npu::npu_lightning_indexer_grad", pre_tokens, next_tokens)
    return torch.ops.ascend.lightning_indexer_grad(
        query, key, dy, sparse_indices, weights, actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key, layout=layout, sparse_mode=sparse_mode,
    )  # fmt: skip


@computes("npu_sparse_lightning_indexer_grad_kl_loss")
def npu_sparse_lightning_indexer_grad_kl_loss(
    *,
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_klen: Sequence[int] | None,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _all_tokens("npu::npu_sparse_lightning_indexer_grad_kl_loss", pre_tokens, next_tokens)
    return torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(
        query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum,
        scale_value=scale_value, query_rope=query_rope, key_rope=key_rope,
        actual_seq_lengths_query=actual_seq_qlen, actual_seq_lengths_key=actual_seq_klen,
        layout=layout, sparse_mode=sparse_mode,
    )  # fmt: skip


def _given_value(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise unsupported(name, "value", "a tensor", None)
    return value


def _absorbed(name: str, attention_mode: int) -> None:
    if attention_mode != _ABSORBED:
        raise unsupported(name, "attention_mode", f"{_ABSORBED}", attention_mode)


def _all_tokens(name: str, pre_tokens: int, next_tokens: int) -> None:
    for argument, tokens in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        if tokens != ALL_TOKENS_SPARSE:
            raise unsupported(name, argument, f"{ALL_TOKENS_SPARSE}", tokens)


def _one_layout(
    name: str, argument: str, layout_query: str, layout: str, block_table: Tensor | None
) -> None:
    if layout != layout_query:
        raise unsupported(name, argument, f"{_PAGED} or layout_query, {layout_query}", layout)
    if block_table is not None:
        raise ValueError(
            f"{name}: block_table: expected None beside {argument} {layout}, got a tensor"
        )
