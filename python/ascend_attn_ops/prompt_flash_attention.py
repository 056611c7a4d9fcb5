"""Attention over all keys that a mask keeps, for inference, in floating point and in int8."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ascend_attn_ops._operators import operators
from ascend_attn_ops.flash_attention_score import default_scale_value
from ascend_attn_ops.masks import compressed_mask, needs_compressed_mask


def prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    atten_mask: Tensor | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    scale_value: float | None = None,
    pre_tokens: int = 2147483647,
    next_tokens: int = 0,
    layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
) -> Tensor:
    """Attention of every query over the keys that its mask keeps, without a gradient.

    With S the scores of a row::

        S   = query @ key^T * scale_value
        P   = exp(S - max(S[kept]));  out = P[kept] @ value[kept] / sum(P[kept])

    and with int8 query, key and value, S in float16 and the sum over P that is not rounded::

        S   = half(saturate(int32(query @ key^T) * deq_scale1)) * half(scale_value)
        out = int32(int8(P * quant_scale1) @ value) * deq_scale2 / sum(P)

    deq_scale2 therefore contains 1 / quant_scale1. With quant_scale2 the output is int8::

        int8(half(out) * quant_scale2 + quant_offset2)

    where int8(x) rounds half to even and saturates. Rows behind the valid length of their batch and
    rows that keep no key are zero, in int8 as well. :func:`flash_attention_score` is the operator
    that has a gradient.

    Args:
        query: (B, Sq, N*D) in layout BSH, (B, Sq, N, D) in BSND, (B, N, Sq, D) in BNSD and
            BNSD_BSND; float16, bfloat16 or int8 (float32 and float64 as well when the device limits
            are off).
        key: as query, with Skv tokens and Nk heads: query head n reads key head n // (N / Nk).
        value: as key.
        num_heads: N.
        atten_mask: bool, int8 or uint8, **True (1) masks a key out**. sparse_mode 0 and 1: (Sq,
            Skv), (B, Sq, Skv), (1, Sq, Skv), (B, 1, Sq, Skv) or (1, 1, Sq, Skv), or with more rows
            and columns, which do not count. Modes 2 to 4 read the rule from a compressed mask,
            (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048), built and kept when None.
        actual_seq_lengths_query: per batch, how many of the Sq queries are valid, or one number for
            all batches; more numbers than batches are ignored. None or empty for all.
        actual_seq_lengths_key: as actual_seq_lengths_query, of key.
        deq_scale1: one float32, or one uint64 whose low half has a float32's upper 19 bits.
            Required with int8 inputs, as quant_scale1 and deq_scale2; None otherwise.
        quant_scale1: one float32.
        deq_scale2: as deq_scale1, of the same dtype.
        quant_scale2: makes the output int8: one float32 value, or, where D is a multiple of 32, one
            for each of the N * D channels; also bfloat16 beside bfloat16 inputs.
        quant_offset2: of quant_scale2's dtype and shape; None for 0. Not where the mask leaves rows
            without keys, which are 0 and not their offset.
        scale_value: None for 1 / sqrt(D).
        pre_tokens: sparse_mode 0 with a mask, and 4: keys before the diagonal that are kept.
        next_tokens: the same, behind it. The default 0 makes **any mask of sparse_mode 0 causal as
            well**: with a mask of padding, say, pass 2147483647, or sparse_mode 1.
        layout: "BSH", "BSND", "BNSD", or "BNSD_BSND" for an output in BSND.
        num_key_value_heads: Nk, a divisor of N and at least N / 64; 0 for N.
        sparse_mode: which keys are kept. 0: all without a mask, otherwise those of atten_mask
            within pre_tokens and next_tokens; 1: those of atten_mask; 2: causal from the top left;
            3: causal to the bottom right; 4: a band to the bottom right. The corners are those of
            the valid lengths.

    Returns:
        Tensor of query's shape, in layout BNSD_BSND (B, Sq, N, D); int8 with quant_scale2,
        otherwise float16 for int8 inputs and query's dtype for others.

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a shape, length, layout, mode, mask content, scale or device limit is violated.
        NotImplementedError: the product in force has no such operator; a gradient is wanted.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(2, 4, 6, 64, dtype=torch.bfloat16)
        >>> key, value = torch.randn(2, 2, 2, 9, 64, dtype=torch.bfloat16)
        >>> out = ascend_attn_ops.prompt_flash_attention(
        ...     query, key, value, num_heads=4, num_key_value_heads=2, layout="BNSD_BSND",
        ...     actual_seq_lengths_query=[6, 3], actual_seq_lengths_key=[9, 5], sparse_mode=3)
        >>> out.shape, out[1, 3:].any().item()
        (torch.Size([2, 6, 4, 64]), False)

    Source: seed PromptFlashAttentionV2 (003_65e2a14407c8df3c).
    """
    if atten_mask is None and needs_compressed_mask(sparse_mode):
        atten_mask = compressed_mask(sparse_mode, query.device)
    if scale_value is None:
        scale_value = default_scale_value(query, num_heads, layout)
    return operators().prompt_flash_attention(
        query,
        key,
        value,
        num_heads,
        atten_mask,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        deq_scale1,
        quant_scale1,
        deq_scale2,
        quant_scale2,
        quant_offset2,
        scale_value,
        pre_tokens,
        next_tokens,
        layout,
        num_key_value_heads,
        sparse_mode,
    )
