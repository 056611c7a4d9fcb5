"""The parts of lightning_indexer_kl_loss: checks, the loss of a given target, divisors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import (
    check_factor,
    check_flag,
    dtype_name,
    shown,
    whole,
    wrong,
)
from ascend_attn_ops._core.packing import Lengths, lengths_on

from .sparse_lightning_indexer_kl_loss_grad import sparse_lightning_indexer_kl_loss_grad

_NAME = "ascend::lightning_indexer_kl_loss"
_OF_ATTENTION = (
    "query", "key", "softmax_max", "softmax_sum", "scale_value", "query_rope", "key_rope"
)  # fmt: skip
_SMALLEST = 1e-8


def divergences(target: Tensor, softmax: Tensor) -> Tensor:
    """log p - log y of every slot."""
    return target.clamp(min=_SMALLEST).log() - softmax.clamp(min=_SMALLEST).log()


def gradients_and_loss(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    target: Tensor,
    factors: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """The gradients of query_index, key_index and weights, and the loss, (1,)."""
    # Padding has a target of 0, and may have any weight.
    scaled = target if factors is None else torch.where(target == 0, target, target * factors)
    *gradients, softmax = sparse_lightning_indexer_kl_loss_grad(
        query_index, key_index, weights, sparse_indices, scaled, **options
    )
    divergence = divergences(target, softmax.view(target.shape))
    # A factor or a target of 0 leaves out what has no logarithm, too.
    return *gradients, torch.where(scaled == 0, 0, scaled * divergence).sum().reshape(1)


class _LossWithTarget(torch.autograd.Function):
    """The loss, (1,), whose gradients are computed with it: its backward scales them, on the
    device."""

    @staticmethod
    def forward(
        ctx: Any,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        sparse_indices: Tensor,
        target: Tensor,
        factors: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        *gradients, loss = gradients_and_loss(
            query_index, key_index, weights, sparse_indices, target, factors, options
        )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [x.dtype for x in (query_index, key_index, weights)]
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # The saved gradients are constants: a second derivative would silently be zero.
        if torch.is_grad_enabled():
            expected = "a first derivative"
            got = "a second derivative, which this operator does not have"
            raise wrong(NotImplementedError, _NAME, "gradient", expected, got)
        gradients = (
            # In float32: for a mean over many tokens, d_loss is small.
            (gradient * d_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None, None)


def loss_with_target(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    normalize: bool,
    options: dict[str, Any],
) -> Tensor:
    """The sum over all tokens, (). `token_weight` is a factor of each token."""
    check_flag(_NAME, "normalize_target", normalize)
    target, factors = prepared_target(target, sparse_indices, token_weight, normalize)
    loss: Tensor = _LossWithTarget.apply(
        query_index, key_index, weights, sparse_indices, target, factors, options
    )
    return loss.squeeze(0)


def prepared_target(
    target: Tensor, sparse_indices: Tensor, token_weight: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor | None]:
    """The target, 0 where there is no key, and the factors of its rows."""
    # The device wants 0 where there is no key.
    target = target.detach()
    if sparse_indices.numel() == target.numel():  # the operator refuses others
        target = target.masked_fill(sparse_indices.view(target.shape) < 0, 0)
    if normalize:
        target = target / one_for_zero(target.sum(-1, keepdim=True))
    factors = None
    if token_weight is not None:
        factors = token_weight.detach().to(target.dtype)
        factors = factors.reshape(*factors.shape, *[1] * (target.dim() - factors.dim()))
    return target, factors


def tokens_of(
    query: Tensor, lengths: Lengths, layout: str, token_weight: Tensor | None, dtype: torch.dtype
) -> Tensor | int:
    """The number of query tokens that belong to a sequence, or the sum of their weights, 1 for
    none; nothing waits for the device."""
    batches = query.shape[:-2]
    ends = lengths_on(lengths, query)
    if token_weight is None:
        if ends is None:
            return max(math.prod(batches), 1)  # numel() would make symbols constant
        token_weight = torch.ones(batches, dtype=dtype, device=query.device)
    if ends is not None:
        if layout == "TND":
            ends = ends[-1:] if ends.numel() else ends.new_zeros(1)
        else:
            ends = ends[:, None]
        # Multiplying by a mask would keep the NaN that padding may hold.
        token_weight = torch.where(
            torch.arange(batches[-1], device=query.device) < ends, token_weight, 0
        )
    return one_for_zero(token_weight.sum(dtype=dtype))


def check_attention(attention: Sequence[Tensor | float | None], target: Tensor | None) -> None:
    """Raises unless the target is given, or all of what it is computed from."""
    for name, x in zip(_OF_ATTENTION, attention, strict=True):
        if target is not None and x is not None:
            raise wrong(ValueError, _NAME, name, "None beside a target", shown(x))
        if target is None and x is None and not name.endswith("_rope"):
            expected = "the attention's, or a target in place of the attention"
            raise wrong(ValueError, _NAME, name, expected, "None")


def check_no_target(
    normalize_target: bool, cmp_ratio: int, cmp_residual_key: Tensor | None = None
) -> None:
    """Raises for options that a loss without a target does not have."""
    check_flag(_NAME, "normalize_target", normalize_target)
    of_target = (
        ("normalize_target", normalize_target, False, not normalize_target),
        ("cmp_ratio", cmp_ratio, 1, whole(cmp_ratio) == 1),
        ("cmp_residual_key", cmp_residual_key, None, cmp_residual_key is None),
    )
    for name, given, default, is_default in of_target:
        if not is_default:
            raise wrong(ValueError, _NAME, name, f"{default} without a target", shown(given))


def check_divisor(reduction: str, normalizer: Tensor | float | None) -> None:
    if not isinstance(reduction, str) or reduction not in ("sum", "mean"):
        raise wrong(ValueError, _NAME, "reduction", "'sum' or 'mean'", shown(reduction))
    if normalizer is None:
        return
    if reduction == "mean":
        expected = "None beside reduction='mean', which has its own"
        raise wrong(ValueError, _NAME, "normalizer", expected, shown(normalizer))
    check_factor(_NAME, "normalizer", normalizer)


def normalized(loss: Tensor, normalizer: Tensor | float | None) -> Tensor:
    if normalizer is None:
        return loss
    if isinstance(normalizer, (torch.SymInt, torch.SymFloat)):
        return loss / normalizer
    if isinstance(normalizer, Tensor):
        # Two scalars would otherwise take the wider dtype.
        normalizer = normalizer.reshape(()).to(loss.dtype)
    else:
        # torch takes an int of 64 bits, and a number of numpy compares to one of its own.
        normalizer = float(normalizer)
        if normalizer != 0:
            numbers = torch.finfo(loss.dtype)
            # torch would round it to 0 in the loss's dtype, and 0 / 0 is NaN.
            if abs(normalizer) < numbers.tiny:
                expected = f"0 or a number that {dtype_name(loss.dtype)} holds"
                raise wrong(ValueError, _NAME, "normalizer", expected, shown(normalizer))
            return loss / normalizer
    # No rank has a token.
    nothing = (loss == 0) & (normalizer == 0)
    return loss / torch.where(nothing, 1, normalizer)


def one_for_zero(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1, total)
