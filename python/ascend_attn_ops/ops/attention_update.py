"""The merge of attention results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ascend_attn_ops._core.operators import Operator

_OPERATOR = Operator("attention_update")


def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention results over disjoint sets of keys into the result over all of them.

    Sums are float32 (float64 for float64), and do not overflow. Results may be merged again.
    Differentiable with respect to every tensor of lse and local_out, through both outputs.

    Args:
        lse: one tensor (...) per part, float32 (float64 beside float64): the log of the sum of
            exp(score), which :func:`ascend_attn_ops.log_sum_exp` computes from the statistics of an
            operator. -inf, or flash-attn's +inf, where the part has no key for the row.
        local_out: one tensor (..., D) per part, all float16, bfloat16 or float32 (or float64 when
            the device limits are off): attention over the part's keys.

    Returns:
        out, (..., D) in local_out's dtype, and lse_out, (...) in lse's. A row without keys in any
        part has out 0 and lse_out -inf.

    Raises:
        As :func:`flash_attention_score`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> lse = [torch.zeros(2), torch.tensor([0.0, -torch.inf])]
        >>> local_out = [torch.ones(2, 8), 3 * torch.ones(2, 8)]
        >>> out, lse_out = ascend_attn_ops.attention_update(lse, local_out)
        >>> out[:, 0].tolist()  # the second row has keys in the first part only
        [2.0, 1.0]

    Source: docs/operators/attention_update.md; CANN's document of aclnnAttentionUpdate.
    """
    return _OPERATOR.call(lse, local_out)
