"""The gradients of attention over all keys that a mask keeps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("flash_attention_score_grad")


def flash_attention_score_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor | None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    pse_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    prefix: Lengths = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    scale_value: float | None = None,
    keep_prob: float = 1.0,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
    d_softmax_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`flash_attention_score`, which autograd calls by itself.

    The keywords are the forward's, with the values that it had.

    Args:
        query, key, value: as in the forward.
        dy: gradient of out; out's shape and dtype. None, beside d_softmax_sum: zeros.
        softmax_max, softmax_sum: statistics from the forward.
        attention_in: out from the forward.
        d_softmax_sum: gradient of softmax_sum, in its shape; the eight values of a row are added.
            Beside dy, the NPU launches the function a second time for it.

    Returns:
        dq, dk, dv, each with the shape and dtype of its tensor.

    Raises:
        As :func:`flash_attention_score`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> options = {"num_heads": 4, "layout": "BSND", "scale_value": 0.125}
        >>> query, key, value = torch.randn(3, 1, 6, 4, 64, dtype=torch.bfloat16)
        >>> out, *statistics = ascend_attn_ops.flash_attention_score(query, key, value, **options)
        >>> d_query, d_key, d_value, *_ = ascend_attn_ops.flash_attention_score_grad(
        ...     query, key, value, torch.ones_like(out), *statistics, out, **options)
        >>> round(d_value[0, :, 0, 0].sum().item())  # the weights of six queries
        6

    Source: docs/operators/flash_attention_score.md; CANN's documents of
    aclnnFlashAttentionScoreGradV2 and aclnnFlashAttentionUnpaddingScoreGradV2.
    """
    gradients: tuple[Tensor, Tensor, Tensor] = _OPERATOR.call(
        query, key, value, dy, softmax_max, softmax_sum, attention_in, num_heads, layout, pse_shift,
        drop_mask, atten_mask, prefix, actual_seq_lengths_query, actual_seq_lengths_key,
        q_start_idx, kv_start_idx, scale_value, keep_prob, pre_tokens, next_tokens, inner_precise,
        sparse_mode, pse_type, d_softmax_sum,
    )  # fmt: skip
    return gradients
