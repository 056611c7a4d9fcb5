"""The LightningIndexer over int8 queries and keys, as models are served."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("quant_lightning_indexer")


def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    *,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    layout_key: str | None = None,
    block_table: Tensor | None = None,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
) -> Tensor:
    """Score int8 keys for each int8 query token and select the `sparse_count` best.

    :func:`quantize_index_keys` makes int8 numbers and scales of queries and of keys. An operator
    for inference, without a gradient.

    Args:
        query: (B, S1, Nidx, Didx), or (T1, Nidx, Didx) in layout TND; int8.
        key: (B, S2, 1, Didx) or (T2, 1, Didx), or with layout_key "PA_BSND" a cache, (num_blocks,
            block_size, 1, Didx); int8.
        weights: (B, S1, Nidx) or (T1, Nidx); float16, or float32 when the device limits are off.
            May be negative.
        query_dequant_scale: as weights, the scale of each row of query.
        key_dequant_scale: the scale of each row of key: key's shape without its last axis; a dtype
            of weights.
        actual_seq_lengths_query, actual_seq_lengths_key, layout, sparse_count, sparse_mode,
            pre_tokens, next_tokens, layout_key, block_table: as in :func:`lightning_indexer`.
        query_quant_mode, key_quant_mode: 0, a scale for each token and head.

    Returns:
        sparse_indices, int32, (B, S1, 1, K) or (T1, 1, K): the indices of the keys in their
        sequence, best first, equal scores by index, padded with -1.

    Raises:
        TypeError: a dtype is not supported; float8 and hifloat8, which Ascend 950 takes, are not.
        ValueError: a shape, length, layout, mode or device limit is violated.
        NotImplementedError: the product in force has no such operator for int8; a tensor requires
            grad.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query, query_scale = ascend_attn_ops.quantize_index_keys(torch.randn(1, 6, 64, 128))
        >>> key, key_scale = ascend_attn_ops.quantize_index_keys(torch.randn(1, 6, 1, 128))
        >>> weights = torch.rand(1, 6, 64, dtype=torch.float16)
        >>> indices = ascend_attn_ops.quant_lightning_indexer(
        ...     query, key, weights, query_scale, key_scale, sparse_count=4)
        >>> indices[0, 0, 0].tolist()  # the first token sees itself only
        [0, -1, -1, -1]

    Source: docs/operators/quant_lightning_indexer.md; CANN's document of
    aclnnQuantLightningIndexer.
    """
    return _OPERATOR.call(
        query, key, weights, query_dequant_scale, key_dequant_scale, actual_seq_lengths_query,
        actual_seq_lengths_key, layout, sparse_count, sparse_mode, pre_tokens, next_tokens,
        layout_key, block_table, query_quant_mode, key_quant_mode,
    )  # fmt: skip
