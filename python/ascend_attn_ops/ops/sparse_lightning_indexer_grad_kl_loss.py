"""The KL loss that trains the LightningIndexer, with its gradients in one pass."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("sparse_lightning_indexer_grad_kl_loss")


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
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    deterministic: bool = False,
    token_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The KL loss that trains the indexer and its gradients, in one pass.

    To autograd this is a loss: ``loss`` is differentiable with respect to query_index, key_index
    and weights; the three gradient outputs are not differentiable. Most users want
    :func:`lightning_indexer_kl_loss`, which returns only the loss and documents the arguments.

    Args:
        pre_tokens, next_tokens: ignored in mode 3.

    Returns:
        d_query_index, d_key_index, d_weights, each with the shape and dtype of its tensor; and
        loss, (1,), float32 (float64 for float64 inputs): the sum over all tokens, in nats.

    Raises:
        As :func:`lightning_indexer_kl_loss`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def zeros(*shape):
        ...     return torch.zeros(1, 4, *shape, dtype=torch.bfloat16)
        >>> query, latent = 1 + zeros(64, 512), zeros(1, 512)
        >>> latent[:, 0] = 1  # all attention goes to the first token
        >>> options = {"scale_value": 192**-0.5, "query_rope": zeros(64, 64),
        ...            "key_rope": zeros(1, 64)}
        >>> indexer = zeros(8, 128), zeros(1, 128), zeros(8)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(*indexer)
        >>> _, *statistics = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, **options)
        >>> *_, d_weights, loss = ascend_attn_ops.sparse_lightning_indexer_grad_kl_loss(
        ...     query, latent, *indexer, indices, *statistics, **options)
        >>> round(loss.item(), 2)  # log(1 * 2 * 3 * 4): the indexer tells no keys apart
        3.18

    Source: docs/operators/sparse_lightning_indexer_grad_kl_loss.md; CANN's document of
    aclnnSparseLightningIndexerGradKLLoss.
    """
    return _OPERATOR.call(
        query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum,
        scale_value, query_rope, key_rope, actual_seq_lengths_query, actual_seq_lengths_key, layout,
        sparse_mode, pre_tokens, next_tokens, deterministic, token_weight,
    )  # fmt: skip
