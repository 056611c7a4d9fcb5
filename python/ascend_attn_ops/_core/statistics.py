"""Softmax statistics of attention: their log-sum-exp, their order in packs, and how parts merge.

The statistics of a row are the maximum of its scores and the sum of exp(score - maximum). A row
without keys has 0 and 0, or in dense attention -FLT_MAX and +FLT_MAX.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_memory, check_tensor, dtype_name, wrong
from ascend_attn_ops._core.packing import Lengths, lengths_on

_NAME = "ascend::log_sum_exp"
_FLT_MAX = torch.finfo(torch.float32).max
LANES = 8  # Dense attention repeats each statistic so often, along a last axis.


def log_sum_exp(softmax_max: Tensor, softmax_sum: Tensor) -> Tensor:
    """The log-sum-exp of each row of attention, from the statistics that an operator returned.

    ::

        log_sum_exp = log(sum over keys of exp(score)) = softmax_max + log(softmax_sum)

    Differentiable with respect to both statistics; rows without keys have a gradient of 0. The
    operators differentiate softmax_sum and count softmax_max as constant, which adds up.

    Args:
        softmax_max: the largest score of each row: (B, N, Sq, 8) or (T, N, 8) from
            :func:`flash_attention_score`, (B, 1, S, N) or (1, T, N) from
            :func:`sparse_flash_attention`, or any other shape.
        softmax_sum: the sum of exp(score - softmax_max), in the shape and dtype of softmax_max.

    Returns:
        The shape and dtype of softmax_max; **-inf** in rows without keys, as
        :func:`attention_update` expects.

    Raises:
        TypeError: an argument is not a tensor of a floating point dtype, or the dtypes differ.
        ValueError: the shapes or the devices differ.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.zeros(1, 2, 6, 64)
        >>> key, value = torch.randn(2, 1, 2, 9, 64)
        >>> out, softmax_max, softmax_sum = ascend_attn_ops.flash_attention_score(
        ...     query, key, value, num_heads=2, layout="BNSD")
        >>> lse = ascend_attn_ops.log_sum_exp(softmax_max, softmax_sum)[..., 0]
        >>> round(lse[0, 0, 0].exp().item(), 3)  # of scores of 0: the number of keys
        9.0
    """
    for name, x in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
        check_tensor(_NAME, name, x)
        if not x.is_floating_point():
            raise wrong(TypeError, _NAME, name, "a floating point dtype", dtype_name(x.dtype))
        check_memory(_NAME, name, x)
    if softmax_sum.dtype != softmax_max.dtype:
        expected = f"dtype {dtype_name(softmax_max.dtype)} (softmax_max's)"
        raise wrong(TypeError, _NAME, "softmax_sum", expected, dtype_name(softmax_sum.dtype))
    for what, wanted, given in (
        ("shape", list(softmax_max.shape), list(softmax_sum.shape)),
        ("device", softmax_max.device, softmax_sum.device),
    ):
        if given != wanted:
            expected = f"{what} {wanted} (softmax_max's)"
            raise wrong(ValueError, _NAME, "softmax_sum", expected, str(given))
    return log_sum_exp_or(-torch.inf, softmax_max, softmax_sum)


def log_sum_exp_or(without_keys: float, maximum: Tensor, total: Tensor) -> Tensor:
    """The log-sum-exp, with another value in rows without keys."""
    dead = (total == 0) | (maximum == -_FLT_MAX)
    # The gradient of log(0) would be NaN, masked or not.
    lse = maximum + total.masked_fill(dead, 1).log()
    return lse.masked_fill(dead, without_keys)


def statistics_of(lse: Tensor, without_keys: float) -> tuple[Tensor, Tensor]:
    """Statistics of dense attention with this log-sum-exp."""
    dead = lse == without_keys
    return lse.masked_fill(dead, -_FLT_MAX), torch.ones_like(lse).masked_fill(dead, _FLT_MAX)


def by_head(statistics: Tensor, ends: Lengths) -> Tensor:
    """Returns the statistics of a pack of dense attention as (N, T, ...).

    They are (T, N, ...), but hold (N, length, ...) of one sequence after another.

    Args:
        ends: cumulative lengths, without a leading 0; a last 0 may close them. Tokens behind the
            last sequence count as a sequence.
    """
    tokens, heads = statistics.shape[:2]
    places = _places(tokens, heads, ends, statistics)
    return statistics.flatten(0, 1).index_select(0, places).unflatten(0, (heads, tokens))


def by_token(statistics: Tensor, ends: Lengths) -> Tensor:
    """The same as (T, N, ...) that hold (N, ...) of one token after another."""
    return by_head(statistics, ends).transpose(0, 1)


def by_sequence(x: Tensor, ends: Lengths) -> Tensor:
    """The inverse of `by_head`."""
    heads, tokens = x.shape[:2]
    places = _places(tokens, heads, ends, x)
    rows = x.flatten(0, 1)
    return torch.empty_like(rows).index_copy(0, places, rows).unflatten(0, (tokens, heads))


def _places(tokens: int, heads: int, ends: Lengths, like: Tensor) -> Tensor:
    """Returns at which row a pack holds each statistic, (N * T,), on the device of `like`."""
    on_device = lengths_on(ends, like)
    assert on_device is not None
    first, last = on_device.new_zeros(1), on_device.new_full((1,), tokens)
    bounds = torch.cat((first, on_device, last)).long().cummax(0).values
    token = torch.arange(tokens, device=like.device)
    sequence = torch.searchsorted(bounds[1:], token, right=True)
    begin, end = (x.index_select(0, sequence) for x in (bounds, bounds[1:]))
    head = torch.arange(heads, device=like.device)[:, None]
    return (begin * heads + head * (end - begin) + token - begin).flatten()


class Merged(NamedTuple):
    """Statistics over two disjoint sets of keys, and the share of each set in the weights."""

    maximum: Tensor
    total: Tensor
    shares: tuple[Tensor, Tensor]


def merge(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Merged:
    """Merges the statistics, (maximum, sum), of attention over disjoint sets of keys."""
    (max_x, sum_x), (max_y, sum_y) = x, y
    maximum = torch.maximum(max_x, max_y)
    weight_x, weight_y = sum_x * (max_x - maximum).exp(), sum_y * (max_y - maximum).exp()
    # In dense attention, a row without keys in either set has twice FLT_MAX, which overflows.
    total = (weight_x + weight_y).clamp(max=_FLT_MAX)
    return Merged(maximum, total, (weight_x / total, weight_y / total))
