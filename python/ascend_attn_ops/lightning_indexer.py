"""The LightningIndexer of DeepSeek Sparse Attention: scoring and selection."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._operators import operators

# Ignored by the sparse modes 0 and 3.
_ALL_TOKENS = 9223372036854775807


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    return_values: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score every key for each query token and keep the `sparse_count` best.

    ::

        score[i, s] = sum over heads h of weights[i, h] * relu(query[i, h] . key[s])

    Differentiable with respect to query, key and weights through the returned values.

    Args:
        query: (B, S1, Nidx, Didx), or (T1, Nidx, Didx) in layout TND; float16 or bfloat16 (float32
            and float64 as well when the device limits are off).
        key: (B, S2, 1, Didx) or (T2, 1, Didx); query's dtype.
        weights: (B, S1, Nidx) or (T1, Nidx); query's dtype or float32. May be negative.
        actual_seq_lengths_query: (B,); int32. BSND: valid tokens per batch, optional, without
            gradient only. TND: required, inclusive prefix sums (lengths 3, 2, 4 are 3, 5, 9).
        actual_seq_lengths_key: as actual_seq_lengths_query, for key.
        layout: "BSND" or "TND".
        sparse_count: K, the number of keys to keep.
        sparse_mode: 0, every key of the sequence is visible; 3, causal, the last query token sees
            the last key.
        pre_tokens: ignored by modes 0 and 3.
        next_tokens: ignored by modes 0 and 3.
        return_values: also return the scores of the kept keys.

    Returns:
        sparse_indices, int32, (B, S1, 1, K) or (T1, 1, K): keys relative to the first of their
        sequence, best first, equal scores in the order of the keys, padded with -1; and
        sparse_values, query's dtype, of the same shape, padded with -inf; (0,) without
        return_values.

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a shape, length, layout, mode or device limit is violated.
        NotImplementedError: the product in force has no such operator; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 6, 8, 128, dtype=torch.bfloat16)
        >>> key = torch.randn(1, 6, 1, 128, dtype=torch.bfloat16)
        >>> weights = torch.rand(1, 6, 8, dtype=torch.bfloat16)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(query, key, weights, sparse_count=4)
        >>> indices[0, 0, 0].tolist()  # the first token sees itself only
        [0, -1, -1, -1]

    Source: LightningIndexer, as the seed SparseLightningIndexerGradKLLoss
    (000_7e7b0f625029119b), section "功能说明", defines it.
    """
    return operators().lightning_indexer(
        query,
        key,
        weights,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        layout,
        sparse_count,
        sparse_mode,
        pre_tokens,
        next_tokens,
        return_values,
    )


def lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    d_values: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`lightning_indexer` through its values; autograd calls this itself.

    Args:
        query, key, weights: as in the forward.
        d_values: gradient of sparse_values; (B, S1, 1, K) or (T1, 1, K), query's dtype.
        sparse_indices: what the forward returned; the leading min(K, visible keys) are read.
        actual_seq_lengths_query, actual_seq_lengths_key: TND only, as in the forward.
        layout, sparse_mode, pre_tokens, next_tokens: as in the forward.
        deterministic: as torch.use_deterministic_algorithms; the CPU always is.

    Returns:
        d_query, d_key, d_weights, each of the shape and dtype of what it belongs to.

    Raises:
        As :func:`lightning_indexer`; ValueError also for lengths in layout BSND.

    Source: LightningIndexerGrad; the formulas are those of the seed
    SparseLightningIndexerGradKLLoss (000_7e7b0f625029119b) with d_values for dI.
    """
    return operators().lightning_indexer_grad(
        query,
        key,
        d_values,
        sparse_indices,
        weights,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        layout,
        sparse_mode,
        pre_tokens,
        next_tokens,
        deterministic,
    )
