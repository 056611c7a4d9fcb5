"""The gradients of the loss that trains an indexer towards given probabilities."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("sparse_lightning_indexer_kl_loss_grad")


def sparse_lightning_indexer_kl_loss_grad(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    attn_softmax_l1_norm: Tensor,
    *,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    cmp_residual_key: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the KL loss of an indexer whose target is given, as in DeepSeek-V4.

    A row counts as much as its target adds up to. No loss comes out:
    :func:`lightning_indexer_kl_loss` with ``target=`` is one that autograd differentiates.
    :func:`sparse_lightning_indexer_grad_kl_loss` is another loss, which computes its target itself.

    Args:
        query_index, key_index: as query and key of :func:`lightning_indexer`.
        weights: (B, S1, Nidx) or (T1, Nidx); float32, without the device limits also
            query_index's dtype. The scores have no scale: put it into the weights.
        sparse_indices: (B, S1, 1, K) or (T1, 1, K), also without the axis of heads. Keys that the
            query does not see are passed over.
        attn_softmax_l1_norm: the target p of every slot, as sparse_indices; float32 (float64 for
            float64 inputs). Pass 0 behind the last selected key.
        actual_seq_lengths_query, actual_seq_lengths_key: as in :func:`lightning_indexer`.
        cmp_residual_key, layout, sparse_mode, cmp_ratio: as in :func:`lightning_indexer`.
        deterministic: the same bits in every run. The CPU always gives them; CANN documents that
            A2 and A3 do not, where True is an error.

    Returns:
        d_query_index, d_key_index, d_weights, each with the shape and dtype of its tensor and for
        the sum over all tokens; and softmax_out, the softmax of the indexer's scores, 0 in
        slots without a key, shaped as sparse_indices, in the dtype of the target.

    Raises:
        As :func:`sparse_flash_attention`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query_index = torch.randn(1, 8, 8, 128, dtype=torch.bfloat16)
        >>> key_index = torch.randn(1, 2, 1, 128, dtype=torch.bfloat16)  # each of four tokens
        >>> indexer = query_index, key_index, torch.rand(1, 8, 8) * 128**-0.5
        >>> indices, _ = ascend_attn_ops.lightning_indexer(*indexer, sparse_count=512, cmp_ratio=4)
        >>> target = (indices >= 0) * 0.25
        >>> *_, softmax = ascend_attn_ops.sparse_lightning_indexer_kl_loss_grad(
        ...     *indexer, indices, target, cmp_ratio=4)
        >>> softmax[0, 3, 0, :2].tolist()  # the fourth token sees the first key
        [1.0, 0.0]

    Source: docs/operators/sparse_lightning_indexer_kl_loss_grad.md; CANN's document of
    aclnnSparseLightningIndexerKLLossGrad.
    """
    return _OPERATOR.call(
        query_index, key_index, weights, sparse_indices, attn_softmax_l1_norm,
        actual_seq_lengths_query, actual_seq_lengths_key, cmp_residual_key, layout, sparse_mode,
        cmp_ratio, deterministic,
    )  # fmt: skip
