"""Masks that flash_attention_score makes for its callers: an inverted one, and one for dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import (
    check_memory,
    check_number,
    check_tensor,
    dtype_name,
    shown,
    whole,
    wrong,
)
from ascend_attn_ops._core.packing import Lengths, lengths_between, lengths_of

_NAME = "ascend::flash_attention_score"
# The axes of batch, tokens and heads, -1 for none. BSH and SBH share that of the heads with D.
_AXES = _C.layout_axes


def mask_of_either_polarity(atten_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """`atten_mask`, or `attn_mask` inverted."""
    if attn_mask is None:
        return atten_mask
    if atten_mask is not None:
        expected = "None beside atten_mask (True masks a key out)"
        raise wrong(ValueError, _NAME, "attn_mask", expected, "both")
    check_tensor(_NAME, "attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool:
        got = dtype_name(attn_mask.dtype)
        if attn_mask.is_floating_point():
            got += "; pass what is added to the scores as pse_shift with pse_type=0"
        raise wrong(TypeError, _NAME, "attn_mask", "dtype bool, where True keeps a key", got)
    if not torch.compiler.is_compiling():
        check_memory(_NAME, "attn_mask", attn_mask)
    return ~attn_mask


def given_or_drawn_mask(
    drop_mask: Tensor | None,
    keep_prob: float,
    dropout_p: float,
    generator: torch.Generator | None,
    query: Tensor,
    key: Tensor,
    num_heads: int | None,
    layout: str,
    actual_seq_lengths_query: Lengths,
    actual_seq_lengths_key: Lengths,
) -> Tensor | None:
    """`drop_mask`, or with `dropout_p` one bit for each score."""
    if not isinstance(dropout_p, float):
        check_number(_NAME, "dropout_p", dropout_p)
        if isinstance(dropout_p, Tensor):
            # torch does not compare every dtype.
            dropout_p = float(dropout_p)
    if dropout_p == 0:
        return drop_mask
    if not 0 <= dropout_p < 1:
        expected = "a probability in [0, 1)"
        raise wrong(ValueError, _NAME, "dropout_p", expected, shown(dropout_p))
    check_number(_NAME, "keep_prob", keep_prob)
    if drop_mask is not None or keep_prob != 1:
        expected = "0 beside drop_mask and keep_prob"
        raise wrong(ValueError, _NAME, "dropout_p", expected, shown(dropout_p))
    if generator is not None and not isinstance(generator, torch.Generator):
        expected = "a torch.Generator or None"
        raise wrong(TypeError, _NAME, "generator", expected, type(generator).__name__)
    # The operator refuses what returns None here, before it looks for a mask.
    if num_heads is None:
        num_heads = heads_of(query, layout)
    if not have_scores(query, key, num_heads, layout):
        return None
    num_heads = whole(num_heads)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key)
    compiling, packed = torch.compiler.is_compiling(), layout == "TND"
    most = num_heads * query.shape[0] * key.shape[0]
    if packed and compiling and any(isinstance(x, Tensor) for x in lengths):
        # One bit for each pair of tokens, of any sequences: a trace cannot read their lengths.
        scores = most
    else:
        scores = number_of_scores(query, key, num_heads, layout, *lengths)
        # A mask for lengths beyond the tokens may not fit into memory.
        if packed and not compiling and not 0 <= scores <= most:
            return None
    if generator is not None and generator.device != query.device:
        expected = f"one of device {query.device} (query's)"
        raise wrong(ValueError, _NAME, "generator", expected, str(generator.device))
    return draw_drop_mask(scores, 1 - dropout_p, query.device, generator)


def heads_of(query: Tensor, layout: str) -> int | None:
    """The number of query heads, where the layout tells it."""
    axes = _AXES.get(layout) if isinstance(layout, str) else None
    if axes is None or not isinstance(query, Tensor) or query.dim() != len(layout):
        return None
    return None if axes[2] == query.dim() - 1 else query.shape[axes[2]]


def have_scores(query: Tensor, key: Tensor, num_heads: int | None, layout: str) -> bool:
    """Whether `number_of_scores` can be told: the tensors have the layout, and query the heads."""
    if not (isinstance(layout, str) and layout in _AXES):
        return False
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        return False
    heads: int | None = None if num_heads is None else whole(num_heads)
    # A layout has a letter for each axis.
    if heads is None or heads <= 0 or not query.dim() == key.dim() == len(layout):
        return False
    axis = _AXES[layout][2]
    # In BSH and SBH, the heads share their axis.
    merged = axis == query.dim() - 1
    return query.shape[axis] % heads == 0 if merged else query.shape[axis] == heads


def number_of_scores(
    query: Tensor,
    key: Tensor,
    num_heads: int | Any,
    layout: str,
    actual_seq_lengths_query: Lengths,
    actual_seq_lengths_key: Lengths,
) -> int:
    """The elements of (B, N, Sq, Skv), in TND of (N, Sq, Skv) of all sequences."""
    if layout == "TND":
        given = {"query": actual_seq_lengths_query, "key": actual_seq_lengths_key}
        ends = [lengths_of(x, where=(_NAME, f"actual_seq_lengths_{i}")) for i, x in given.items()]
        # The operator refuses lengths that are no list.
        lengths = [lengths_between(x if isinstance(x, Sequence) else (), closed=True) for x in ends]
        pairs = sum(a * b for a, b in zip(*lengths, strict=False))
    else:
        # Another name is an error of the operator.
        batch, tokens, _ = _AXES.get(str(layout), (0, 1, 2))
        pairs = query.shape[batch] * query.shape[tokens] * key.shape[tokens]
    return num_heads * pairs


def draw_drop_mask(
    scores: int,
    keep_prob: float,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One bit per score, 1 with probability `keep_prob`, padded to a multiple of 16 bytes.

    Needs memory for the mask and one chunk of random numbers.
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
