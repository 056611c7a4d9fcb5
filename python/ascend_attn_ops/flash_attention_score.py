"""Attention over all keys that a mask keeps, for training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ascend_attn_ops._operators import operators
from ascend_attn_ops.masks import compressed_mask, needs_compressed_mask

_ALL_TOKENS = 2147483647


def flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    layout: str,
    pse_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    scale_value: float | None = None,
    keep_prob: float = 1.0,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query over the keys that its mask keeps.

    With S the scores of a row and `keep` the dropout::

        S   = (query @ key^T + pse) * scale_value         pse_type 1, or without pse_shift
        S   = query @ key^T * scale_value + pse           pse_type 0, 2 and 3
        out = (softmax(S[kept]) * keep / keep_prob) @ value[kept]

    Rows that keep no key are zero. Differentiable with respect to query, key and value, and on the
    CPU with respect to the pse_shift of pse_type 0 and 1.

    Where query is bfloat16 the weights are rounded to it before the product with value; on the
    CPU rows over few keys, up to 128, carry what that loses.

    Args:
        query: (B, Sq, N*D) in layout BSH, (Sq, B, N*D) in SBH, (B, Sq, N, D) in BSND,
            (B, N, Sq, D) in BNSD, (T1, N, D) in TND; float16, bfloat16 or float32 (float64 as well
            when the device limits are off).
        key: as query, with Skv tokens and Nk heads, where Nk divides N: query head n reads key
            head n // (N / Nk).
        value: as key, with a head size Dv of at most D.
        num_heads: N.
        layout: "BSH", "SBH", "BSND", "BNSD" or "TND".
        pse_shift: what is added to the scores. pse_type 0 and 1: (B, N, Sq, Skv), (1, N, Sq, Skv)
            or (B, N, 1, Skv), query's dtype; with Sq == Skv > 1024 and a causal mask also
            (B | 1, N, 1024, Skv), the last rows of values that depend on the distance alone; in
            TND flat, (N, Sq, Skv) of one sequence after another, or (N, Skv). pse_type 2 and 3:
            positive float32 slopes, (N) or (B, N).
        drop_mask: uint8, one bit per element of (B, N, Sq, Skv), the lowest first, 1 keeps. With
            keep_prob < 1. `dropout_p` draws one instead.
        atten_mask: bool or uint8, **True masks a key out**. sparse_mode 0 and 1: (B, N, Sq, Skv),
            (B, 1, Sq, Skv), (1, 1, Sq, Skv) or (Sq, Skv); (max Sq, max Skv) in TND. Mode 5:
            (B, N, Sq, Skv) or (B, 1, Sq, Skv). All others read the rule from a compressed mask,
            (2048, 2048), in mode 6 (3072, 2048), which is built and kept when None.
        attn_mask: atten_mask with the polarity of scaled_dot_product_attention, True keeps a key.
        prefix: sparse_mode 5 and 6: per batch, the number of keys that all queries keep.
        actual_seq_lengths_query: TND: inclusive prefix sums of the lengths of the sequences
            (lengths 3, 2, 4 are given as 3, 5, 9).
        actual_seq_lengths_key: as actual_seq_lengths_query, of key.
        q_start_idx: pse_type 2 and 3: the position of the first query, counted when kv_start_idx
            is given.
        kv_start_idx: pse_type 2 and 3: the position of the first key.
        scale_value: None for 1 / sqrt(D).
        keep_prob: the share of weights that drop_mask keeps.
        dropout_p: the share of weights to drop. The mask is drawn from `generator`, on the device,
            and kept for the backward.
        generator: of query's device; None for the default one.
        pre_tokens: sparse_mode 0, 4, 7 and 8: keys before the diagonal that are kept.
        next_tokens: the same, behind it. `python -m ascend_attn_ops mask` draws every mode.
        inner_precise: how the device treats precision and rows without keys, 0 to 2; the CPU
            computes as for 2.
        sparse_mode: which keys are kept. 0: those of atten_mask within pre_tokens and next_tokens;
            1: those of atten_mask; 2: causal from the top left; 3: causal to the bottom right;
            4: a band to the bottom right; 5 and 6: mode 3 and a prefix; 7 and 8, for TND: mode 3
            with a band in the last sequence, mode 2 with a band in the first.
        pse_type: 0, 1: pse_shift is added behind, or before the scale. 2, 3: what is added is minus
            the slope times the distance of query and key, or times its square root.

    Returns:
        out, in query's layout with head size Dv, and the maximum and the sum of exp(S - maximum)
        of each row, float32 (float64 for float64 inputs), eight times each: (B, N, Sq, 8). In TND
        (T1, N, 8), for the backward to read.

    Raises:
        TypeError: a dtype is not supported or disagrees; a float mask.
        ValueError: a shape, length, layout, mode, mask content or device limit is violated.
        NotImplementedError: the product in force has no such operator; a gradient of pse_shift on
            the NPU or of slopes; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 6, 4, 64, dtype=torch.bfloat16)
        >>> key, value = torch.randn(2, 1, 9, 2, 64, dtype=torch.bfloat16)
        >>> out, softmax_max, softmax_sum = ascend_attn_ops.flash_attention_score(
        ...     query, key, value, num_heads=4, layout="BSND", sparse_mode=3)
        >>> out.shape, softmax_max.shape
        (torch.Size([1, 6, 4, 64]), torch.Size([1, 4, 6, 8]))

    Source: the forward of the seed FlashAttentionScoreGradV2 (002_e7d31711fa8f234d).
    """
    if attn_mask is not None:
        atten_mask = _inverted(attn_mask, atten_mask)
    elif atten_mask is None and needs_compressed_mask(sparse_mode):
        atten_mask = compressed_mask(sparse_mode, query.device)
    if scale_value is None:
        scale_value = default_scale_value(query, num_heads, layout)
    if dropout_p != 0:
        keep_prob = _keep_prob(dropout_p, keep_prob, drop_mask)
        lengths = (actual_seq_lengths_query, actual_seq_lengths_key)
        scores = _score_count(query, key, num_heads, layout, *lengths)
        drop_mask = draw_drop_mask(scores, keep_prob, query.device, generator)
    return operators().flash_attention_score(
        query,
        key,
        value,
        num_heads,
        layout,
        pse_shift,
        drop_mask,
        atten_mask,
        prefix,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        q_start_idx,
        kv_start_idx,
        scale_value,
        keep_prob,
        pre_tokens,
        next_tokens,
        inner_precise,
        sparse_mode,
        pse_type,
    )


def flash_attention_score_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    *,
    num_heads: int,
    layout: str,
    pse_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_lengths_query: Sequence[int] | None = None,
    actual_seq_lengths_key: Sequence[int] | None = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`flash_attention_score`; autograd calls this by itself.

    With P the attention weights of a row, rebuilt from the statistics::

        dV = (P * keep / keep_prob)^T @ dy
        dS = P * (dy @ value^T * keep / keep_prob - rowsum(dy * attention_in))
        dQ = scale_value * dS @ key;   dK = scale_value * dS^T @ query

    P and dS are rounded to bfloat16 before the products where query is bfloat16; sums are float32
    (float64 for float64 inputs).

    Args:
        query, key, value and all keywords: what the operator of the forward was given. Here
            scale_value is 1.0 unless given, and no mask is built.
        dy: gradient of out; out's shape and dtype.
        softmax_max, softmax_sum, attention_in: what the forward returned, attention_in its out.

    Returns:
        dq, dk, dv, each of the shape and dtype of what it belongs to.

    Raises:
        As :func:`flash_attention_score`.

    Source: seed FlashAttentionScoreGradV2 (002_e7d31711fa8f234d).
    """
    return operators().flash_attention_score_grad(
        query,
        key,
        value,
        dy,
        softmax_max,
        softmax_sum,
        attention_in,
        num_heads,
        layout,
        pse_shift,
        drop_mask,
        atten_mask,
        prefix,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        q_start_idx,
        kv_start_idx,
        scale_value,
        keep_prob,
        pre_tokens,
        next_tokens,
        inner_precise,
        sparse_mode,
        pse_type,
    )


def default_scale_value(query: Tensor, num_heads: int, layout: str) -> float:
    """1 / sqrt(D). What has no D, or is no tensor, the operator will say."""
    width = query.shape[-1] if isinstance(query, Tensor) and query.dim() else 0
    size = width // max(num_heads, 1) if layout in ("BSH", "SBH") else width
    return max(size, 1) ** -0.5


def draw_drop_mask(
    scores: int,
    keep_prob: float,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One bit per score, 1 with probability keep_prob, in a whole number of 16 bytes.

    The memory is that of the mask and of a chunk of random numbers.
    """
    size = -(-scores // 128) * 16
    mask = torch.empty(size, dtype=torch.uint8, device=device)
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    # torch.compile would turn a number of chunks, and with it the size, into a constant.
    for part in (mask,) if torch.compiler.is_compiling() else mask.split(1 << 20):
        numbers = torch.empty((part.shape[0], 8), device=device)
        keep = numbers.uniform_(generator=generator) < keep_prob
        part.copy_((keep * bit).sum(1, dtype=torch.uint8))
    return mask


_NAME = "ascend::flash_attention_score"
_INVALID = "[ACLNN_ERR_PARAM_INVALID 161002]"


def _inverted(attn_mask: Tensor, atten_mask: Tensor | None) -> Tensor:
    if atten_mask is not None:
        raise ValueError(
            f"{_NAME}: attn_mask: expected None beside atten_mask (True masks a key out), "
            f"got both {_INVALID}"
        )
    if attn_mask.dtype != torch.bool:
        advice = (
            "; pse_shift takes what is added to the scores" if attn_mask.is_floating_point() else ""
        )
        raise TypeError(
            f"{_NAME}: attn_mask: expected dtype bool, where True keeps a key, "
            f"got {str(attn_mask.dtype).removeprefix('torch.')}{advice} {_INVALID}"
        )
    return ~attn_mask


def _keep_prob(dropout_p: float, keep_prob: float, drop_mask: Tensor | None) -> float:
    if not 0 <= dropout_p < 1:
        raise ValueError(
            f"{_NAME}: dropout_p: expected a probability in [0, 1), got {dropout_p} {_INVALID}"
        )
    if drop_mask is not None or keep_prob != 1:
        raise ValueError(
            f"{_NAME}: dropout_p: expected 0 beside drop_mask and keep_prob, "
            f"got {dropout_p} {_INVALID}"
        )
    return 1 - dropout_p


def _score_count(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    layout: str,
    query_ends: Sequence[int] | None,
    key_ends: Sequence[int] | None,
) -> int:
    if layout == "TND":
        ends = [[0, *(x or [])] for x in (query_ends, key_ends)]
        spans = [[b - a for a, b in pairwise(x)] for x in ends]
        return num_heads * sum(a * b for a, b in zip(*spans, strict=False))
    batch_axis = 1 if layout == "SBH" else 0
    token_axis = {"SBH": 0, "BNSD": 2}.get(layout, 1)
    pairs = query.shape[token_axis] * key.shape[token_axis]
    return query.shape[batch_axis] * num_heads * pairs
