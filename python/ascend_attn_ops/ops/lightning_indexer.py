"""The LightningIndexer of DeepSeek Sparse Attention: which keys each query attends to."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("lightning_indexer")
_GRADIENT = Operator("lightning_indexer_grad")


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    return_values: bool = False,
    layout_key: str | None = None,
    block_table: Tensor | None = None,
    cmp_ratio: int = 1,
    cmp_residual_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score the keys for each query token and select the `sparse_count` best.

    Differentiable with respect to query, key and weights through the returned values, unless
    cmp_ratio is above 1.

    Args:
        query: (B, S1, Nidx, Didx), or (T1, Nidx, Didx) in layout TND; float16 or bfloat16 (float32
            and float64 as well when the device limits are off).
        key: (B, S2, 1, Didx) or (T2, 1, Didx), or with layout_key "PA_BSND" a cache, (num_blocks,
            block_size, 1, Didx); query's dtype.
        weights: (B, S1, Nidx) or (T1, Nidx); query's dtype or float32. May be negative. The
            gradient and some NPUs require query's dtype.
        actual_seq_lengths_query: B whole numbers, a tensor or a list. BSND: valid tokens per batch,
            optional. TND: required, cumulative lengths without a leading 0 (3, 5, 9 for lengths 3,
            2, 4).
        actual_seq_lengths_key: as actual_seq_lengths_query, for key. With "PA_BSND" required: the
            number of keys of each sequence, not cumulative, in either layout.
        layout: "BSND" or "TND", of the queries.
        sparse_count: K, how many keys to select.
        sparse_mode: 0, every key of the sequence is visible; 3, causal, the last query sees up to
            the last key.
        pre_tokens: ignored in modes 0 and 3; the NPU takes the default only.
        next_tokens: as pre_tokens.
        return_values: also return the scores of the selected keys; not with "PA_BSND".
        layout_key: None or as layout; or "PA_BSND": key s of sequence b is row s % block_size of
            block block_table[b, s // block_size] of the cache.
        block_table: (B, M), int32 or int64; with "PA_BSND" only.
        cmp_ratio: tokens per key, above 1 for the compressed keys of DeepSeek-V4. NPUs want float32
            weights beside it.
        cmp_residual_key: (B,): the tokens behind the last complete key, in [0, cmp_ratio). None:
            the keys stand for the tokens of the queries, as in training.

    Returns:
        sparse_indices, int32, (B, S1, 1, K) or (T1, 1, K): the indices of the keys in their
        sequence, best first, equal scores by index, padded with -1; and sparse_values, their scores
        in query's dtype and the same shape, padded with -inf; (0,) without return_values. With
        cmp_ratio above 1 the scores are float32 (float64 for float64 inputs).

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a shape, length, layout, mode or device limit is violated.
        NotImplementedError: the product in force has no such operator; a second derivative;
            a gradient of the values with cmp_ratio above 1.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 6, 8, 128, dtype=torch.bfloat16)
        >>> key = torch.randn(1, 6, 1, 128, dtype=torch.bfloat16)
        >>> weights = torch.rand(1, 6, 8, dtype=torch.bfloat16)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(query, key, weights, sparse_count=4)
        >>> indices[0, 0, 0].tolist()  # the first token sees itself only
        [0, -1, -1, -1]

    Source: docs/operators/lightning_indexer.md; CANN's document of aclnnLightningIndexer.
    """
    return _OPERATOR.call(
        query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, layout, sparse_count,
        sparse_mode, pre_tokens, next_tokens, return_values, layout_key, block_table,
        cmp_ratio, cmp_residual_key,
    )  # fmt: skip


def lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    d_values: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`lightning_indexer` through its values; autograd calls this by itself.

    The other keywords are the forward's, with the same values.

    Args:
        query, key, weights: as in the forward; the NPU wants weights in query's dtype.
        d_values: gradient of sparse_values; shaped as sparse_indices, query's dtype.
        sparse_indices: from the forward; as d_values also without the axis of heads, (B, S1, K) or
            (T1, K). The first min(K, visible keys) slots are read.
        deterministic: as in :func:`sparse_flash_attention`.

    Returns:
        d_query, d_key, d_weights, each with the shape and dtype of its tensor.

    Raises:
        As :func:`lightning_indexer`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.ones(1, 64, 8, 128, dtype=torch.bfloat16)
        >>> key = torch.ones(1, 64, 1, 128, dtype=torch.bfloat16)
        >>> weights = torch.rand(1, 64, 8, dtype=torch.bfloat16)
        >>> indices, values = ascend_attn_ops.lightning_indexer(
        ...     query, key, weights, return_values=True)
        >>> d_query, d_key, d_weights = ascend_attn_ops.lightning_indexer_grad(
        ...     query, key, torch.ones_like(values), indices, weights)
        >>> d_weights[0, :3, 0].tolist()  # 128 for each key that a token sees
        [128.0, 256.0, 384.0]

    Source: docs/operators/lightning_indexer.md; CANN's document of aclnnLightningIndexerGrad.
    """
    return _GRADIENT.call(
        query, key, d_values, sparse_indices, weights, actual_seq_lengths_query,
        actual_seq_lengths_key, layout, sparse_mode, pre_tokens, next_tokens, deterministic,
    )  # fmt: skip
