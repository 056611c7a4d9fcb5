"""Attention over all keys that a mask keeps, for inference, in floating point or int8."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Never

from ascend_attn_ops._core.operators import ALL_TOKENS, Operator, refuse_unknown
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("prompt_flash_attention")


def prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    scale_value: float | None = None,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    **unknown: Never,
) -> Tensor:
    """Attention of every query over the keys that its mask keeps, without gradients.

    Rows after the valid length of their batch and rows that keep no key are zero, in int8 as well.
    For gradients, use :func:`flash_attention_score`.

    Args:
        query: (B, Sq, N*D) in layout BSH, (B, Sq, N, D) in BSND, (B, N, Sq, D) in BNSD and
            BNSD_BSND; float16, bfloat16 or int8 (float32 and float64 as well when the device limits
            are off).
        key: as query, with Skv tokens and Nk heads: query head n reads key head n // (N / Nk).
        value: as key.
        num_heads: N, the number of query heads. BSH needs it.
        atten_mask: bool, int8 or uint8, **True (1) masks a key out**. sparse_mode 0 and 1: (Sq,
            Skv), (1 or B, Sq, Skv) or (1 or B, 1, Sq, Skv); further rows and columns are ignored.
            Modes 2 to 4 need no mask.
        actual_seq_lengths_query: how many of the Sq queries are valid, for each batch, or one
            number for all of them; further numbers are ignored. None or empty: all Sq. A tensor or
            a list; a tensor on the NPU makes the call wait for it.
        actual_seq_lengths_key: as actual_seq_lengths_query, for key.
        deq_scale1: scale of the int32 scores: one float32, or one uint64 whose low half holds the
            upper 19 bits of a float32. Required with int8 inputs, like the next two.
        quant_scale1: scale of the weights before they are rounded to int8; one float32.
        deq_scale2: scale of out, with 1 / quant_scale1 in it; as deq_scale1, of the same dtype.
        quant_scale2: makes the output int8. One value, or N * D if D is a multiple of 32; float32,
            or the half type of the inputs.
        quant_offset2: dtype and shape of quant_scale2; None for 0.
        scale_value: factor of the scores; None for 1 / sqrt(D).
        pre_tokens: sparse_mode 0 with a mask, and 4: how many keys before the diagonal are kept.
        next_tokens: how many after it.
        layout: "BSH", "BSND", "BNSD", or "BNSD_BSND": inputs in BNSD, output in BSND.
        num_key_value_heads: Nk, a divisor of N and at least N / 64; 0 for N.
        sparse_mode: 0 to 4, as in :func:`flash_attention_score`, for the valid lengths. 0 without a
            mask keeps all keys.

    Returns:
        A tensor of query's shape, in layout BNSD_BSND (B, Sq, N, D). int8 with quant_scale2,
        otherwise float16 for int8 inputs and query's dtype for all others.

    Raises:
        As :func:`flash_attention_score`; also NotImplementedError for an input that requires grad.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(2, 4, 6, 64, dtype=torch.bfloat16)
        >>> key = torch.randn(2, 2, 9, 64, dtype=torch.bfloat16)
        >>> value = torch.ones_like(key)
        >>> out = ascend_attn_ops.prompt_flash_attention(
        ...     query, key, value, num_heads=4, num_key_value_heads=2, layout="BNSD_BSND",
        ...     actual_seq_lengths_query=[6, 3], actual_seq_lengths_key=[9, 5], sparse_mode=3)
        >>> out[1, :, 0, 0].round().tolist()  # three tokens and padding
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]

    Source: docs/operators/prompt_flash_attention.md; CANN's documents of
    aclnnPromptFlashAttentionV3 and aclnnFusedInferAttentionScoreV5.
    """
    if unknown:
        refuse_unknown("prompt_flash_attention", unknown)
    out: Tensor = _OPERATOR.call(
        query, key, value, num_heads, atten_mask, actual_seq_lengths_query, actual_seq_lengths_key,
        deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2, scale_value, pre_tokens,
        next_tokens, layout, num_key_value_heads, sparse_mode,
    )  # fmt: skip
    return out
