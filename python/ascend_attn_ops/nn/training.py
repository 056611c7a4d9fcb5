"""Helpers for trainers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from ascend_attn_ops._core.arguments import (
    check_factor,
    check_tensor,
    dtype_name,
    warn_once,
    wrong,
)
from ascend_attn_ops._core.torch_private import is_functorch_wrapped_tensor

_ATTACH_LOSS = "ascend::attach_loss"


class _AttachLoss(torch.autograd.Function):
    """The identity of its first argument, whose backward starts the backward of the second."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, loss, scale = inputs
        ctx.set_materialize_grads(False)
        ctx.factor = None if isinstance(scale, Tensor) else float(scale)
        # The loss itself, a scalar, for its shape, dtype and device.
        ctx.save_for_backward(loss, *([scale] if ctx.factor is None else []))

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        loss, *scale = ctx.saved_tensors
        if ctx.factor is None:
            d_loss = torch.ones_like(loss) * scale[0].to(loss.dtype)
        else:
            d_loss = torch.full_like(loss, ctx.factor)
        return d_outputs[0], d_loss, None


def attach_loss(output: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Train on `loss` in the backward of `output`, without adding it to the trainer's own loss.

    When the gradient of `output` arrives in the backward, `scale` times the gradient of `loss`
    flows into the tensors that `loss` depends on, as if the trainer had minimised its own loss plus
    ``scale * loss``. This lets a layer train its indexer in any trainer. Nothing waits for the
    device. Without a gradient of the returned tensor or of `loss`, the loss has no effect.

    Args:
        output: any tensor on the way to the trainer's loss: the layer's output.
        loss: usually a scalar; of other shapes the sum of the elements is the loss.
        scale: factor of the loss's gradient. A tensor with one element is read in the backward, on
            its device. GradScaler and accumulation of gradients do not scale an attached loss.

    Returns:
        A view of `output`. Not to be modified in place, which autograd refuses.

    Raises:
        TypeError: output or loss is not a tensor of a floating point dtype, or scale no number.
        ValueError: a scale of more than one element.

    Example:
        >>> import torch, ascend_attn_ops
        >>> output = torch.randn(3, requires_grad=True)
        >>> parameter = torch.ones(2, requires_grad=True)
        >>> indexer_loss = (parameter**2).sum()
        >>> output = ascend_attn_ops.attach_loss(output, indexer_loss, scale=0.5)
        >>> output.mean().backward()
        >>> parameter.grad
        tensor([1., 1.])
    """
    for name, x in (("output", output), ("loss", loss)):
        check_tensor(_ATTACH_LOSS, name, x)
        if not (x.is_floating_point() or x.is_complex()):
            got = dtype_name(x.dtype)
            raise wrong(TypeError, _ATTACH_LOSS, name, "a floating point dtype", got)
    check_factor(_ATTACH_LOSS, "scale", scale)
    records = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if records and not (loss.requires_grad or is_functorch_wrapped_tensor(loss)):
        text = "requires no gradient and trains nothing; is it detached, or made under no_grad?"
        warn_once(_ATTACH_LOSS, "loss", text)
    return cast("Tensor", _AttachLoss.apply(output, loss, scale))


# Ours, and torch's varlen_attn, which may call one of ours.
_OPERATORS = ("ascend", "torch_attn")


def save_attention_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective activation checkpointing that computes no operator of this library twice.

    A policy for :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts`. A checkpoint
    keeps what the operators return: attention outputs and statistics, selected indices, the
    gradients of the KL loss. Everything else is recomputed in the backward. The policy works in
    eager mode and under torch.compile, with ``use_reentrant=False``. A dropout mask is drawn again:
    torch's own generators draw the same mask, a `generator` that you pass draws another one.

    Args:
        ctx, op, args, kwargs: from torch, which calls it.

    Returns:
        MUST_SAVE for what an operator of this library returns, PREFER_RECOMPUTE for the rest.

    Example:
        >>> import functools, torch, ascend_attn_ops
        >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> context_fn = functools.partial(
        ...     create_selective_checkpoint_contexts, ascend_attn_ops.save_attention_policy)
        >>> def attention(x):
        ...     return ascend_attn_ops.flash_attention_score(
        ...         x, x, x, num_heads=2, layout="BSND")[0].sin()
        >>> x = torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16, requires_grad=True)
        >>> out = checkpoint(attention, x, use_reentrant=False, context_fn=context_fn)
        >>> out.sum().backward()
        >>> x.grad[0, 0, 0, 0].item()
        1.0
    """
    # An operator that writes to its arguments has nothing to keep.
    if op.namespace in _OPERATORS and not op._schema.is_mutable:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
