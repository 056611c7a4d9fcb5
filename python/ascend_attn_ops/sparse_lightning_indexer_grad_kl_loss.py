"""The KL loss that trains the LightningIndexer, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ascend_attn_ops._operators import operators

# Ignored by the sparse mode 3.
_ALL_TOKENS = 9223372036854775807


def sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    *,
    scale_value: float,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The KL loss that trains the indexer, with its gradients, in one pass.

    For each query token, over its selected keys, p is the attention averaged over the heads (the
    target) and y the softmax of the indexer's scores::

        loss = sum over tokens of sum p * (log p - log y);   gradients from y - p

    To autograd this is a loss: ``loss`` is differentiable with respect to query_index, key_index
    and weights, and the three gradient outputs are not differentiable. Most users want
    :func:`lightning_indexer_kl_loss`, which returns the loss alone.

    Args:
        query: (B, S1, N1, D), or (T1, N1, D) in layout TND; of the main attention. float16 or
            bfloat16 (float32 and float64 as well when the device limits are off).
        key: (B, S2, 1, D) or (T2, 1, D); query's dtype.
        query_index: (B, S1, Nidx, Didx) or (T1, Nidx, Didx); query's dtype.
        key_index: (B, S2, 1, Didx) or (T2, 1, Didx); query's dtype.
        weights: (B, S1, Nidx) or (T1, Nidx); query's dtype or float32.
        sparse_indices: (B, S1, 1, K) or (T1, 1, K); int32, the keys selected for each token,
            relative to the first key of the sequence, padded with -1.
        softmax_max, softmax_sum: float32 (B, 1, S1, N1) or (1, T1, N1), from
            :func:`sparse_flash_attention` over the same keys. Nothing is renormalised: with other
            statistics p does not sum to one.
        scale_value: factor of the main attention's scores; the indexer's are not scaled.
        query_rope: (B, S1, N1, Dr) or (T1, N1, Dr); query's dtype. The NPU requires both ropes.
        key_rope: (B, S2, 1, Dr) or (T2, 1, Dr); query's dtype.
        actual_seq_lengths_query: TND only, required there: inclusive prefix sums as Python
            integers (lengths 3, 2, 4 are given as 3, 5, 9).
        actual_seq_lengths_key: the same for key.
        layout: "BSND" or "TND".
        sparse_mode: 3, causal; the last query token sees the last key.
        pre_tokens: ignored by mode 3.
        next_tokens: ignored by mode 3.
        deterministic: as torch.use_deterministic_algorithms; the CPU always is.

    Returns:
        d_query_index, d_key_index, d_weights, each of the shape and dtype of what it belongs to;
        loss, (1,), float32: the sum over all tokens, in nats.

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a shape, length, index, layout, mode or device limit is violated.
        NotImplementedError: the product in force has no such operator.

    Source: seed SparseLightningIndexerGradKLLoss (000_7e7b0f625029119b).
    """
    return operators().sparse_lightning_indexer_grad_kl_loss(
        query,
        key,
        query_index,
        key_index,
        weights,
        sparse_indices,
        softmax_max,
        softmax_sum,
        scale_value,
        query_rope,
        key_rope,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        layout,
        sparse_mode,
        pre_tokens,
        next_tokens,
        deterministic,
    )


def lightning_indexer_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    *,
    scale_value: float,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    deterministic: bool = False,
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """The KL loss between the main attention and the indexer, differentiable, as one number.

    Args:
        reduction: "sum" over the valid query tokens, or "mean" over them: divided by B * S1 in
            BSND and by the last prefix sum in TND.
        Everything else: as in :func:`sparse_lightning_indexer_grad_kl_loss`.

    Returns:
        The loss in nats, a scalar of shape (), float32 (float64 for float64 inputs). Gradients
        flow to query_index, key_index and weights; the attention is a fixed target.

    Raises:
        As :func:`sparse_lightning_indexer_grad_kl_loss`; ValueError for another reduction.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def tensor(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16)
        >>> latent, rope = tensor(1, 4, 1, 512), tensor(1, 4, 1, 64)
        >>> query, query_rope = tensor(1, 4, 8, 512), tensor(1, 4, 8, 64)
        >>> query_index = tensor(1, 4, 8, 128).requires_grad_()
        >>> key_index, weights = tensor(1, 4, 1, 128), tensor(1, 4, 8)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(
        ...     query_index, key_index, weights, sparse_count=1024)
        >>> _, softmax_max, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, scale_value=0.1,
        ...     query_rope=query_rope, key_rope=rope)
        >>> loss = ascend_attn_ops.lightning_indexer_kl_loss(
        ...     query, latent, query_index, key_index, weights, indices, softmax_max, softmax_sum,
        ...     scale_value=0.1, query_rope=query_rope, key_rope=rope, reduction="mean")
        >>> loss.backward()
        >>> query_index.grad.shape
        torch.Size([1, 4, 8, 128])

    Source: seed SparseLightningIndexerGradKLLoss (000_7e7b0f625029119b).
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            "ascend::lightning_indexer_kl_loss: reduction: expected 'sum' or 'mean', "
            f"got {reduction!r}"
        )
    *_, loss = sparse_lightning_indexer_grad_kl_loss(
        query,
        key,
        query_index,
        key_index,
        weights,
        sparse_indices,
        softmax_max,
        softmax_sum,
        scale_value=scale_value,
        query_rope=query_rope,
        key_rope=key_rope,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key,
        layout=layout,
        sparse_mode=sparse_mode,
        deterministic=deterministic,
    )
    loss = loss.squeeze(0)
    if reduction == "sum":
        return loss
    if actual_seq_lengths_query is None:
        tokens = query.shape[0] * query.shape[1]
    else:
        tokens = actual_seq_lengths_query[-1] if len(actual_seq_lengths_query) else 0
    # Without tokens the sum is zero, and so is its mean.
    return loss / max(tokens, 1)
