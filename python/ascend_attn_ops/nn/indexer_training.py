"""DeepSeek-V4's attention and the loss of its indexer, whose target the backward knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_factor
from ascend_attn_ops._core.device_limits import LimitsOfCall, limits_in_force
from ascend_attn_ops._core.packing import Lengths
from ascend_attn_ops.ops._indexer_loss import divergences
from ascend_attn_ops.ops.sparse_flash_mla import sparse_flash_mla
from ascend_attn_ops.ops.sparse_flash_mla_grad import sparse_flash_mla_grad
from ascend_attn_ops.ops.sparse_lightning_indexer_kl_loss_grad import (
    sparse_lightning_indexer_kl_loss_grad,
)

_NAME = "ascend::sparse_flash_mla_with_indexer_loss"


class _Options(NamedTuple):
    """Arguments of the backward's operators, beside tensors."""

    attention: dict[str, Any]
    indexer: dict[str, Any]
    weight: Any  # None for a tensor, which is saved
    token_weight: Tensor | None
    on_results: Callable[[Tensor, Tensor], Tensor | None] | None


class _AttentionWithLoss(torch.autograd.Function):
    """sparse_flash_mla, whose backward also gives the gradients of the indexer's KL loss."""

    @staticmethod
    def forward(
        query: Tensor, ori_kv: Tensor, cmp_kv: Tensor, indices: Tensor, query_index: Tensor,
        key_index: Tensor, weights: Tensor, sink: Tensor | None, weight: Tensor | None,
        probe: Tensor | None, options: _Options,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return sparse_flash_mla(query, ori_kv, cmp_kv, indices, sink=sink, **options.attention)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, probe, options = inputs
        ctx.options, ctx.limits = options, limits_in_force()
        ctx.probe = None if probe is None else (probe.device, probe.dtype)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        with LimitsOfCall(ctx.limits):
            return _AttentionWithLoss._gradients(ctx, d_outputs[0])

    @staticmethod
    def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, ori_kv, cmp_kv, indices, *indexer, sink, weight, out, lse = ctx.saved_tensors
        options: _Options = ctx.options
        d_query, d_ori_kv, d_cmp_kv, d_sink, target = sparse_flash_mla_grad(
            query, ori_kv, cmp_kv, indices, d_out, out, lse, sink=sink, **options.attention
        )
        if options.token_weight is not None:
            target = target * options.token_weight.view(*target.shape[:-2], 1, 1)
        d_indexer: list[Tensor | None] = [None, None, None]
        d_probe = None
        if any(ctx.needs_input_grad[4:7]):
            *gradients, softmax = sparse_lightning_indexer_kl_loss_grad(
                indexer[0], indexer[1], indexer[2], indices, target, **options.indexer
            )
            d_indexer = [
                x * (options.weight if weight is None else weight.to(x.dtype)) for x in gradients
            ]
            if options.on_results is not None:
                d_probe = options.on_results(target, softmax)
        if d_probe is not None:
            d_probe = d_probe.to(*ctx.probe)
        return (
            d_query, d_ori_kv, d_cmp_kv, None, *d_indexer, d_sink if sink is not None else None,
            None, d_probe, None,
        )  # fmt: skip


def indexer_loss(target: Tensor, softmax: Tensor) -> Tensor:
    """The sum over rows and slots of p * (log p - log y)."""
    return (target * divergences(target, softmax)).sum()


def sparse_flash_mla_with_indexer_loss(
    query: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor,
    cmp_sparse_indices: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    scale_value: float,
    indexer_loss_weight: float | Tensor = 1.0,
    on_loss: Callable[[Tensor], None] | None = None,
    sink: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_ori_kv: Lengths = None,
    actual_seq_lengths_cmp_kv: Lengths = None,
    cmp_residual_kv: Tensor | None = None,
    cmp_ratio: int = 4,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 127,
    ori_win_right: int = 0,
    layout: str = "BSND",
    deterministic: bool = False,
) -> Tensor:
    """:func:`sparse_flash_mla` whose backward also trains the indexer that selected its keys.

    The indexer's loss is :func:`lightning_indexer_kl_loss` with the attention's weights on the
    selected keys as its target. The backward of the attention computes them, so the gradient of the
    loss starts there. Detach from the model what query_index, key_index and weights are made of:
    otherwise the loss changes the model too.

    Args:
        query, ori_kv, cmp_kv, cmp_sparse_indices: as in :func:`sparse_flash_mla`.
        query_index, key_index, weights: of the indexer, with which :func:`lightning_indexer` has
            selected cmp_sparse_indices: (B, S1, Nidx, Didx), (B, S3, 1, Didx) and (B, S1, Nidx), in
            layout TND with one axis T in the place of (B, S).
        indexer_loss_weight: factor of the loss's gradient: 1 / (B * S1) for the mean over the
            tokens, times the factor of a loss scaler or of accumulated gradients. A tensor of one
            element is read in the backward, on its device.
        on_loss: called in the backward with the sum of the loss over all rows, (1,), without a
            gradient. The sum may be negative, since the target adds up to less than 1 over the
            selected keys. Not under torch.compile.
        scale_value, sink, actual_seq_lengths_query, actual_seq_lengths_ori_kv,
            actual_seq_lengths_cmp_kv, cmp_residual_kv, cmp_ratio, ori_mask_mode, cmp_mask_mode,
            ori_win_left, ori_win_right, layout, deterministic: as in :func:`sparse_flash_mla`.

    Returns:
        out, as of :func:`sparse_flash_mla`.

    Raises:
        TypeError, ValueError: as :func:`sparse_flash_mla` and
            :func:`sparse_lightning_indexer_kl_loss_grad`, the latter in the backward.
        NotImplementedError: a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def bfloat16(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        >>> query = bfloat16(1, 8, 64, 512)
        >>> ori_kv, cmp_kv = bfloat16(1, 8, 1, 512), bfloat16(1, 2, 1, 512)
        >>> indexer = bfloat16(1, 8, 64, 128), bfloat16(1, 2, 1, 128), torch.rand(1, 8, 64)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(
        ...     *(x.detach() for x in indexer), sparse_count=512, cmp_ratio=4)
        >>> out = ascend_attn_ops.sparse_flash_mla_with_indexer_loss(
        ...     query, ori_kv, cmp_kv, indices, *indexer, scale_value=512**-0.5,
        ...     sink=torch.zeros(64), indexer_loss_weight=1 / 8)
        >>> out.sum().backward()
        >>> indexer[0].grad.abs().amax((0, 2, 3)).count_nonzero().item()  # token 7 has a choice
        1

    Source: docs/operators/sparse_flash_mla.md and
    docs/operators/sparse_lightning_indexer_kl_loss_grad.md.
    """

    def report(target: Tensor, softmax: Tensor) -> None:
        if on_loss is not None:
            on_loss(indexer_loss(target, softmax).reshape(1))

    return attention_with_indexer_loss(
        query, ori_kv, cmp_kv, cmp_sparse_indices, query_index, key_index, weights,
        scale_value=scale_value, indexer_loss_weight=indexer_loss_weight,
        on_results=None if on_loss is None else report, sink=sink,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_ori_kv=actual_seq_lengths_ori_kv,
        actual_seq_lengths_cmp_kv=actual_seq_lengths_cmp_kv, cmp_residual_kv=cmp_residual_kv,
        cmp_ratio=cmp_ratio, ori_mask_mode=ori_mask_mode, cmp_mask_mode=cmp_mask_mode,
        ori_win_left=ori_win_left, ori_win_right=ori_win_right, layout=layout,
        deterministic=deterministic,
    )  # fmt: skip


def attention_with_indexer_loss(
    *tensors: Tensor,
    indexer_loss_weight: float | Tensor,
    on_results: Callable[[Tensor, Tensor], Tensor | None] | None,
    sink: Tensor | None,
    probe: Tensor | None = None,
    token_weight: Tensor | None = None,
    **attention: Any,
) -> Tensor:
    """sparse_flash_mla_with_indexer_loss, which tells `on_results` the target and the softmax.

    Its result becomes the gradient of `probe`, a scalar, by which a compiled backward tells it.
    `token_weight` has a factor of each row's loss, not under torch.compile.
    """
    weight = indexer_loss_weight
    check_factor(_NAME, "indexer_loss_weight", weight)
    query, ori_kv, cmp_kv, indices, query_index, key_index, weights = tensors
    names = {
        "actual_seq_lengths_query": "actual_seq_lengths_query",
        "actual_seq_lengths_key": "actual_seq_lengths_cmp_kv",
        "cmp_residual_key": "cmp_residual_kv",
        "layout": "layout",
        "sparse_mode": "cmp_mask_mode",
        "cmp_ratio": "cmp_ratio",
        "deterministic": "deterministic",
    }
    indexer = {name: attention[of] for name, of in names.items() if of in attention}
    factor = None if isinstance(weight, Tensor) else float(weight)
    options = _Options(attention, indexer, factor, token_weight, on_results)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, ori_kv, cmp_kv, query_index, key_index = (
            x.to(dtype) for x in (query, ori_kv, cmp_kv, query_index, key_index)
        )
    out, _ = _AttentionWithLoss.apply(
        query, ori_kv, cmp_kv, indices, query_index, key_index, weights, sink,
        weight if factor is None else None, probe, options,
    )  # fmt: skip
    return out
