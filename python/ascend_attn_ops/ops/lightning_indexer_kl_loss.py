"""The KL loss that trains the LightningIndexer, differentiable."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._core.packing import Lengths

from . import _indexer_loss as loss_of

_OPERATOR = Operator("sparse_lightning_indexer_grad_kl_loss")


def lightning_indexer_kl_loss(
    query: Tensor | None,
    key: Tensor | None,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    *,
    scale_value: float | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    deterministic: bool = False,
    token_weight: Tensor | None = None,
    reduction: Literal["sum", "mean"] = "sum",
    normalizer: Tensor | float | None = None,
    target: Tensor | None = None,
    normalize_target: bool = False,
    cmp_ratio: int = 1,
    cmp_residual_key: Tensor | None = None,
) -> Tensor:
    """The KL loss between the main attention and the indexer, a differentiable scalar.

    Over the keys selected for a query token, it is ``sum p * (log p - log y)``, with p the
    attention averaged over the heads (the target) and y the softmax of the indexer's scores.
    Gradients flow to query_index, key_index and weights; the target is fixed. It is computed from
    the attention's inputs and statistics; or, as in DeepSeek-V4, it is the `target` that you pass,
    with None for query, key and the statistics.

    Args:
        query, key: of the main attention, as in :func:`sparse_flash_attention`.
        query_index, key_index, weights: as query, key and weights of :func:`lightning_indexer`.
        sparse_indices: what it has selected. For a selection with a tail of recent keys, pass the
            indexer's own K.
        softmax_max, softmax_sum: (B, 1, S1, N1) or (1, T1, N1); float32. From
            :func:`sparse_flash_attention` over the same keys: p is not renormalised.
        scale_value: factor of the main attention's scores, as in `sparse_flash_attention`; the
            indexer's scores have none.
        query_rope, key_rope: as in :func:`sparse_flash_attention`.
        actual_seq_lengths_query, actual_seq_lengths_key: as in :func:`lightning_indexer`.
        layout: "BSND" or "TND".
        sparse_mode: 3, causal, the last query sees up to the last key.
        deterministic: as in :func:`sparse_flash_attention`.
        token_weight: a factor of each token's loss and gradients, (B, S1) or (T1,): bool, False for
            padding and other masked tokens, or floating point. Tokens with factor 0 are not read.
            The NPU takes bool only.
        reduction: "sum" over the query tokens that belong to a sequence, or their "mean": the sum
            divided by their number, or by the sum of their weights.
        normalizer: what the sum is divided by, e.g. the number of valid tokens of all ranks; a
            tensor with one element is read on its device. Without tokens, 0 divided by 0 is 0.
            Instead of reduction="mean".
        target: p, as sparse_indices; float32 (float64 for float64 inputs), such as the last result
            of :func:`sparse_flash_mla_grad`. It may add up to less than 1: a row counts as much as
            that.
        normalize_target: divide each row of `target` by its sum, so that rows count alike.
        cmp_ratio, cmp_residual_key: as in :func:`lightning_indexer`; beside `target` only. Lengths
            in tensors are then read on the device, and sparse_mode may be 0.

    Returns:
        The loss in nats, shape (), float32 (float64 for float64 inputs).

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a target beside an attention, or neither; a shape, length, index, layout, mode,
            reduction or device limit is violated.
        NotImplementedError: the product in force has no such operator; a weight that is not bool,
            on the NPU, without `target`; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def zeros(*shape):
        ...     return torch.zeros(1, 4, *shape, dtype=torch.bfloat16)
        >>> query, query_rope = 1 + zeros(32, 512), zeros(32, 64)
        >>> latent, key_rope = zeros(1, 512), zeros(1, 64)
        >>> latent[:, 0] = 1  # all attention goes to the first token
        >>> attention = {"scale_value": 192**-0.5, "query_rope": query_rope, "key_rope": key_rope}
        >>> query_index = zeros(64, 128).requires_grad_()
        >>> key_index, weights = zeros(1, 128), zeros(64)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(query_index, key_index, weights)
        >>> _, softmax_max, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, **attention)
        >>> loss = ascend_attn_ops.lightning_indexer_kl_loss(
        ...     query, latent, query_index, key_index, weights, indices,
        ...     softmax_max=softmax_max, softmax_sum=softmax_sum, **attention, reduction="mean")
        >>> loss.backward()
        >>> round(loss.item(), 2)  # log(1 * 2 * 3 * 4) / 4: the indexer tells no keys apart
        0.79

    Source: docs/operators/sparse_lightning_indexer_grad_kl_loss.md and
    docs/operators/sparse_lightning_indexer_kl_loss_grad.md.
    """
    loss_of.check_divisor(reduction, normalizer)
    attention = query, key, softmax_max, softmax_sum, scale_value, query_rope, key_rope
    loss_of.check_attention(attention, target)
    if target is not None:
        loss = loss_of.loss_with_target(
            query_index, key_index, weights, sparse_indices, target, token_weight, normalize_target,
            {
                "actual_seq_lengths_query": actual_seq_lengths_query,
                "actual_seq_lengths_key": actual_seq_lengths_key,
                "cmp_residual_key": cmp_residual_key, "layout": layout, "sparse_mode": sparse_mode,
                "cmp_ratio": cmp_ratio, "deterministic": deterministic,
            },
        )  # fmt: skip
    else:
        loss_of.check_no_target(normalize_target, cmp_ratio, cmp_residual_key)
        *_, of_all = _OPERATOR.call(
            query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum,
            scale_value, query_rope, key_rope, actual_seq_lengths_query, actual_seq_lengths_key,
            layout, sparse_mode, ALL_TOKENS_SPARSE, ALL_TOKENS_SPARSE, deterministic, token_weight,
        )  # fmt: skip
        loss = of_all.squeeze(0)
    if reduction == "mean":
        return loss / loss_of.tokens_of(
            query_index, actual_seq_lengths_query, layout, token_weight, loss.dtype
        )
    return loss_of.normalized(loss, normalizer)
