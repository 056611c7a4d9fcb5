"""The gradients of attention over selected keys."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("sparse_flash_attention_grad")


def sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    d_out: Tensor | None,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    *,
    scale_value: float,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    deterministic: bool = False,
    d_softmax_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of :func:`sparse_flash_attention`, which autograd calls by itself.

    **On an NPU every row has to select min(K, visible) keys or blocks**, and no row may select its
    last visible block twice. The keywords are the forward's, with the same values; pre_tokens and
    next_tokens stay at their defaults.

    Args:
        query, key, value, sparse_indices: as in the forward.
        d_out: gradient of out; out's shape and dtype. None, beside d_softmax_sum: zeros.
        out, softmax_max, softmax_sum: results of the forward.
        d_softmax_sum: gradient of softmax_sum, in its shape. softmax_max counts as constant, so
            that it carries all of the log-sum-exp's gradient. The NPU takes it for bfloat16 alone.

    Returns:
        d_query, d_key, d_value, d_query_rope, d_key_rope, each with the shape and dtype of its
        tensor; without ropes the last two are empty, (0,). d_key and d_value stay separate when key
        and value are one tensor, whose gradient is their sum.

    Raises:
        As :func:`sparse_flash_attention`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def bfloat16(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16)
        >>> query, latent = 0 * bfloat16(1, 8, 64, 512), bfloat16(1, 8, 1, 512)
        >>> ropes = {"query_rope": 0 * bfloat16(1, 8, 64, 64), "key_rope": bfloat16(1, 8, 1, 64)}
        >>> indices = torch.full((1, 8, 1, 2048), -1, dtype=torch.int32)
        >>> indices[..., :8] = torch.arange(8, dtype=torch.int32)
        >>> out, *statistics = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, scale_value=192**-0.5, **ropes)
        >>> d_query, d_key, d_value, *_ = ascend_attn_ops.sparse_flash_attention_grad(
        ...     query, latent, latent, indices, torch.ones_like(out), out, *statistics,
        ...     scale_value=192**-0.5, **ropes)
        >>> d_value[0, 7, 0, 0].item()  # an eighth of each head of the last token
        8.0

    Source: docs/operators/sparse_flash_attention.md; CANN's document of
    aclnnSparseFlashAttentionGrad.
    """
    return _OPERATOR.call(
        query, key, value, sparse_indices, d_out, out, softmax_max, softmax_sum, scale_value,
        actual_seq_lengths_query, actual_seq_lengths_key, query_rope, key_rope, sparse_block_size,
        layout, sparse_mode, pre_tokens, next_tokens, deterministic, d_softmax_sum,
    )  # fmt: skip
