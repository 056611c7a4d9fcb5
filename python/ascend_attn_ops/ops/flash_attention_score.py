"""Attention over all keys that a mask keeps, for training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Never

from ascend_attn_ops._core.operators import ALL_TOKENS, Operator, refuse_unknown
from ascend_attn_ops._core.packing import Lengths
from ascend_attn_ops.ops._dense_attention import given_or_drawn_mask, mask_of_either_polarity

_OPERATOR = Operator("flash_attention_score")


def flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    pse_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    prefix: Lengths = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    scale_value: float | None = None,
    keep_prob: float = 1.0,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
    sink: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query over the keys that its mask keeps, with gradients.

    Rows that keep no key are zero. Differentiable with respect to query, key, value, sink and
    ropes, through out and softmax_sum; on the CPU also to pse_shift with pse_type 0 or 1.

    Args:
        query: (B, Sq, N*D) in layout BSH, (Sq, B, N*D) in SBH, (B, Sq, N, D) in BSND,
            (B, N, Sq, D) in BNSD, (T1, N, D) in TND; float16, bfloat16 or float32 (float64 as well
            when the device limits are off).
        key: as query, with Skv tokens and Nk heads: query head n reads key head n // (N / Nk).
        value: as key, with a head size Dv of at most D.
        layout: "BSH", "SBH", "BSND", "BNSD" or "TND", the axes of query.
        num_heads: N, the number of query heads. BSH and SBH need it.
        pse_shift: bias of the scores. pse_type 0 and 1: query's dtype, (B, N, Sq, Skv), whose axes
            B, N and Sq may be 1, or its last 1024 rows; flat in TND. pse_type 2 and 3: positive
            float32 slopes, (N) or (B, N).
        drop_mask: uint8, one bit per element of (B, N, Sq, Skv), lowest bit first, 1 keeps. Needs
            keep_prob < 1. `dropout_p` draws one instead.
        atten_mask: bool or uint8, **True masks a key out**. sparse_mode 0 and 1: (B, N, Sq, Skv),
            whose axes may be 1, or (Sq, Skv); 5: (B, N or 1, Sq, Skv). Other modes need none.
        attn_mask: as in scaled_dot_product_attention, True keeps a key. Pass it instead of
            atten_mask.
        prefix: sparse_mode 5 and 6: for each batch, the number of leading keys that all its queries
            keep; a list or a tensor.
        actual_seq_lengths_query: int32 or int64, or a list. TND: the cumulative lengths of the
            sequences, without a leading 0 (lengths 3, 2, 4 are given as 3, 5, 9). Other layouts:
            how many of its first tokens each batch uses; None for all. A tensor on the NPU makes
            the call wait for it.
        actual_seq_lengths_key: as actual_seq_lengths_query, of key.
        q_start_idx: pse_type 2 and 3: position of the first query; ignored without kv_start_idx.
        kv_start_idx: pse_type 2 and 3: position of the first key.
        scale_value: factor of the scores; None for 1 / sqrt(D), with ropes 1 / sqrt(D + Dr).
        keep_prob: probability with which drop_mask keeps a weight.
        dropout_p: probability of dropping a weight. The mask is saved for the backward.
        generator: draws the mask of dropout_p, on query's device; None for the default generator.
        pre_tokens: sparse_mode 0, 4, 7 and 8: how many keys before the diagonal are kept.
        next_tokens: how many after it. `python -m ascend_attn_ops mask` draws every mode.
        inner_precise: passed to the device, which handles rows without keys if it is 2; the CPU
            always computes as with 2.
        sparse_mode: which keys are kept. 0: those of atten_mask within pre_tokens and next_tokens;
            1: those of atten_mask; 2: causal from the top left; 3: causal to the bottom right;
            4: a band to the bottom right; 5 and 6: mode 3 and a prefix; 7 and 8, for TND: mode 3
            with a band in the last sequence, mode 2 with a band in the first.
        pse_type: 0 adds pse_shift after the scale, 1 before it; 2 adds -slope * distance between
            query and key, 3 adds -slope * sqrt(distance).
        sink: (N), floating point: for every query head the score of one more key, which has no
            value and which scale, bias, mask and dropout leave as it is.
        query_rope: the rotary part of query as a separate tensor: query's shape with Dr instead of
            D. Requires key_rope.
        key_rope: the rotary part of key, with key's heads.

    Returns:
        out, in query's layout with head size Dv, and the statistics that the backward reads:
        softmax_max, the maximum of each row, and softmax_sum, its sum of exp(S - maximum), both
        with the sink; float32 (float64 for float64 inputs), each value eight times: (B, N, Sq, 8),
        in TND (T1, N, 8).

    Raises:
        TypeError: a dtype is not supported or disagrees; a float mask.
        ValueError: a shape, length, layout, mode, mask content or device limit is violated.
        NotImplementedError: the product in force has no such operator; a gradient of pse_shift on
            the NPU or of slopes; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16)  # weighs all keys alike
        >>> key = torch.randn(1, 3, 2, 64, dtype=torch.bfloat16)
        >>> value = torch.arange(3).view(1, 3, 1, 1).expand_as(key).bfloat16()
        >>> out, softmax_max, softmax_sum = ascend_attn_ops.flash_attention_score(
        ...     query, key, value, num_heads=4, layout="BSND", sparse_mode=3)
        >>> out[0, :, 0, 0].tolist()  # the mean of the values so far
        [0.0, 0.5, 1.0]

    Source: docs/operators/flash_attention_score.md; CANN's documents of
    aclnnFlashAttentionScoreV2 and aclnnFlashAttentionVarLenScoreV2.
    """
    if unknown:
        refuse_unknown("flash_attention_score", unknown)
    atten_mask = mask_of_either_polarity(atten_mask, attn_mask)
    drop_mask = given_or_drawn_mask(
        drop_mask, keep_prob, dropout_p, generator, query, key, num_heads, layout,
        actual_seq_lengths_query, actual_seq_lengths_key,
    )  # fmt: skip
    outputs: tuple[Tensor, Tensor, Tensor]
    try:
        outputs = _OPERATOR.call(
            query, key, value, num_heads, layout, pse_shift, drop_mask, atten_mask, prefix,
            actual_seq_lengths_query, actual_seq_lengths_key, q_start_idx, kv_start_idx,
            scale_value, keep_prob if dropout_p == 0 else 1 - dropout_p, pre_tokens, next_tokens,
            inner_precise, sparse_mode, pse_type, sink, query_rope, key_rope,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        if attn_mask is None:
            raise
        # The operator got its inverse.
        raise type(error)(str(error).replace("atten_mask", "attn_mask")) from None
    return outputs
