"""npu_fusion_attention_v3 and its gradient, made for graphs: what is drawn, and the lengths, are
tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._packing import lengths_of
from ascend_attn_ops.npu_operators.dropout import drop_mask
from ascend_attn_ops.npu_operators.fusion_attention import (
    HOW_MASKS_ARE_MADE,
    LAST_SEED,
    Call,
    gradients,
    no_sink,
)
from ascend_attn_ops.npu_operators.kernels import computes, differentiates, has_values


class _Options(NamedTuple):
    """The arguments of npu_fusion_attention_v3 behind the tensors that have gradients."""

    head_num: int
    input_layout: str
    atten_mask: Tensor | None
    scale: float
    keep_prob: float
    pre_tockens: int
    next_tockens: int
    inner_precise: int
    prefix: Sequence[int] | None
    actual_seq_qlen: Tensor | None
    actual_seq_kvlen: Tensor | None
    sparse_mode: int

    def call(self, query: Tensor, key: Tensor, pse: Tensor | None) -> Call:
        query_ends, key_ends = (
            _ends(x, tokens)
            for x, tokens in (
                (self.actual_seq_qlen, query.shape[0]), (self.actual_seq_kvlen, key.shape[0]),
            )
        )  # fmt: skip
        return Call(
            self.head_num, self.input_layout, pse, self.atten_mask, self.prefix, query_ends,
            key_ends, self.scale, self.keep_prob, self.pre_tockens, self.next_tockens,
            self.inner_precise, self.sparse_mode,
        )  # fmt: skip


def _ends(lengths: Tensor | None, tokens: int) -> Sequence[int] | None:
    """Without values, one sequence stands for all: shapes are the same."""
    if lengths is not None and not has_values(lengths):
        return [tokens]
    return lengths_of(lengths)


@computes("npu_fusion_attention_v3", without_effect=HOW_MASKS_ARE_MADE, differentiable=True)
def npu_fusion_attention_v3(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tockens: int,
    next_tockens: int,
    inner_precise: int,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    sparse_mode: int,
) -> tuple[Tensor, ...]:
    call = _Options(
        head_num, input_layout, atten_mask, scale, keep_prob, pre_tockens, next_tockens,
        inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode,
    ).call(query, key, pse)  # fmt: skip
    seed, offset = torch.zeros(2, 1, dtype=torch.int64, device=query.device)
    mask = None
    if keep_prob < 1:
        seed = torch.randint(1, LAST_SEED, (1,), device=query.device)
        mask = drop_mask(call.scores(query, key), keep_prob, seed, offset, query.device)
    out, maximum, total = torch.ops.ascend.flash_attention_score(
        query, key, value, drop_mask=mask, **call._asdict()
    )
    return out, maximum, total, query.new_empty(0), seed, offset


@differentiates("npu_fusion_attention_v3")
def _recorded_v3(**arguments: Any) -> tuple[Tensor, ...]:
    tensors = [arguments.pop(name) for name in ("query", "key", "value", "pse")]
    return _FusionAttentionV3.apply(arguments, *tensors)


class _FusionAttentionV3(torch.autograd.Function):
    """The operator and its gradient stay whole: a graph has the values of lengths as tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        options: dict[str, Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = torch.ops.npu.npu_fusion_attention_v3(query, key, value, pse=pse, **options)
        out, maximum, total, softmax, seed, offset = outputs
        ctx.save_for_backward(query, key, value, pse, *outputs)
        ctx.options = {**options, "scale_value": options["scale"]}
        del ctx.options["scale"]
        ctx.mark_non_differentiable(maximum, total, softmax, seed, offset)
        return out, maximum, total, softmax, seed, offset

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, pse, out, maximum, total, softmax, seed, offset = ctx.saved_tensors
        dq, dk, dv, dpse, _ = torch.ops.npu.npu_fusion_attention_grad_v3(
            query, key, value, d_outputs[0], pse=pse, softmax_max=maximum, softmax_sum=total,
            softmax_in=softmax, attention_in=out, seed=seed, offset=offset, **ctx.options,
        )  # fmt: skip
        return None, dq, dk, dv, dpse if ctx.needs_input_grad[4] else None


@computes("npu_fusion_attention_grad_v3", without_effect=HOW_MASKS_ARE_MADE)
def npu_fusion_attention_grad_v3(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    softmax_in: Tensor | None,
    attention_in: Tensor | None,
    scale_value: float,
    keep_prob: float,
    pre_tockens: int,
    next_tockens: int,
    inner_precise: int,
    seed: Tensor | None,
    offset: Tensor | None,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    sparse_mode: int,
) -> tuple[Tensor, ...]:
    name = "npu::npu_fusion_attention_grad_v3"
    call = _Options(
        head_num, input_layout, atten_mask, scale_value, keep_prob, pre_tockens, next_tockens,
        inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode,
    ).call(query, key, pse)  # fmt: skip
    mask = None
    if keep_prob < 1:
        if seed is None or offset is None:
            missing = "seed" if seed is None else "offset"
            raise ValueError(f"{name}: {missing}: expected that of the forward, got None")
        mask = drop_mask(call.scores(query, key), keep_prob, seed, offset, query.device)
    saved = (softmax_max, softmax_sum, softmax_in, attention_in)
    dq, dk, dv, dpse = gradients(name, call, query, key, value, dy, saved, mask)
    # torch_npu's fake tensors have an empty one, too.
    return dq, dk, dv, query.new_empty(0) if dpse is None else dpse, no_sink(query)
