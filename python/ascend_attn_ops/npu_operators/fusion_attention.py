"""npu_fusion_attention, its versions and their gradients: what flash_attention_score lacks.

That is dropout by seed and offset, and ropes. In _v3, which is made for graphs, what is drawn and
the lengths are tensors. The operators are called, not the public functions: torch_npu builds no
mask, and its scale is 1. `options` are arguments of flash_attention_score or of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._dense_attention import number_of_scores
from ascend_attn_ops._packing import lengths_of
from ascend_attn_ops._torch import below_autograd
from ascend_attn_ops.npu_operators.dropout import drop_mask as mask_of
from ascend_attn_ops.npu_operators.layouts import check_ropes
from ascend_attn_ops.npu_operators.translation import has_values, unsupported

_LAST_SEED = 2**62
Options = dict[str, Any]


def forward(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    drop_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    if drop_mask is None and (seed or offset):
        raise unsupported(name, "seed", "0 without a dropout_mask, as it is drawn", (seed, offset))
    scores = _scores(query, key, options)
    if drop_mask is None and options["keep_prob"] < 1:
        drawn = torch.randint(1, _LAST_SEED, (), device=query.device)
        # In a graph the number would be a constant: 0, as torch_npu has it there.
        seed = int(drawn.item()) if has_values(query) else 0
        drop_mask = mask_of(scores, options["keep_prob"], drawn, offset, query.device)
    out, maximum, total = torch.ops.ascend.flash_attention_score(
        query, key, value, drop_mask=drop_mask, **options
    )
    return out, maximum, total, query.new_empty(0), seed, offset, scores


def forward_v2(
    name: str,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    seed: int = 0,
    offset: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    query, key = _with_ropes(name, options, query, key, query_rope, key_rope)
    return forward(name, query, key, seed=seed, offset=offset, **options)


def forward_v3(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    options |= _lengths_on_host(query, key, options)
    seed, offset = torch.zeros(2, 1, dtype=torch.int64, device=query.device)
    keep_prob, mask = options["keep_prob"], None
    if keep_prob < 1:
        seed = torch.randint(1, _LAST_SEED, (1,), device=query.device)
        mask = mask_of(_scores(query, key, options), keep_prob, seed, offset, query.device)
    statistics = torch.ops.ascend.flash_attention_score(
        query, key, value, drop_mask=mask, **options
    )
    return *statistics, query.new_empty(0), seed, offset


def grad(
    name: str,
    query: Tensor,
    key: Tensor,
    softmax_in: Tensor | None,
    seed: int,
    offset: int,
    numels: int,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    mask = None
    if options["keep_prob"] != 1:
        if seed == offset == 0 and has_values(query):
            raise ValueError(
                f"{name}: seed: expected the seed and offset that the forward returned, got 0 and "
                "0, which it returns where it is compiled; npu_fusion_attention_v3 returns tensors "
                "there"
            )
        mask = mask_of(numels, options["keep_prob"], seed, offset, query.device)
    return _gradients(name, query, key, softmax_in, mask, options)


def grad_v2(
    name: str,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    softmax_in: Tensor | None,
    seed: int,
    offset: int,
    numels: int,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    joined = _with_ropes(name, options, query, key, query_rope, key_rope)
    dq, dk, dv, dpse, d_sink = grad(name, *joined, softmax_in, seed, offset, numels, **options)
    dq, dq_rope = _without_rope(options, query, dq, query, query_rope)
    dk, dk_rope = _without_rope(options, query, dk, key, key_rope)
    return dq, dk, dv, dpse, dq_rope, dk_rope, d_sink


def grad_v3(
    name: str,
    query: Tensor,
    key: Tensor,
    softmax_in: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    options |= _lengths_on_host(query, key, options)
    keep_prob, mask = options["keep_prob"], None
    if keep_prob < 1:
        if seed is None or offset is None:
            missing = "seed" if seed is None else "offset"
            raise ValueError(f"{name}: {missing}: expected that of the forward, got None")
        mask = mask_of(_scores(query, key, options), keep_prob, seed, offset, query.device)
    dq, dk, dv, dpse, d_sink = _gradients(name, query, key, softmax_in, mask, options)
    # torch_npu's fake tensors have an empty one, too.
    return dq, dk, dv, query.new_empty(0) if dpse is None else dpse, d_sink


def autograd_v3(
    query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, **options: Any
) -> tuple[Tensor, ...]:
    return _FusionAttentionV3.apply(options, query, key, value, pse)


class _FusionAttentionV3(torch.autograd.Function):
    """The operator and its gradient stay whole: a graph has the values of lengths as tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            outputs = torch.ops.npu.npu_fusion_attention_v3(query, key, value, pse=pse, **options)
        ctx.save_for_backward(query, key, value, pse, *outputs)
        ctx.options = {**options, "scale_value": options["scale"]}
        del ctx.options["scale"]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, pse, out, maximum, total, softmax, seed, offset = ctx.saved_tensors
        dq, dk, dv, dpse, _ = torch.ops.npu.npu_fusion_attention_grad_v3(
            query, key, value, d_outputs[0], pse=pse, softmax_max=maximum, softmax_sum=total,
            softmax_in=softmax, attention_in=out, seed=seed, offset=offset, **ctx.options,
        )  # fmt: skip
        return None, dq, dk, dv, dpse if ctx.needs_input_grad[4] else None


def _gradients(
    name: str,
    query: Tensor,
    key: Tensor,
    softmax_in: Tensor | None,
    mask: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """dq, dk, dv, dpse, and an empty tensor in the place of the gradient of a sink."""
    if softmax_in is not None and softmax_in.numel():
        raise unsupported(name, "softmax_in", "the empty tensor of the forward", softmax_in)
    for argument in ("softmax_max", "softmax_sum", "attention_in"):
        if options[argument] is None:
            raise ValueError(f"{name}: {argument}: expected the result of the forward, got None")
    arguments = {**options, "query": query, "key": key, "drop_mask": mask}
    dq, dk, dv = torch.ops.ascend.flash_attention_score_grad(**arguments)
    dpse = None
    if options["pse_shift"] is not None and options.get("pse_type", 1) <= 1:
        dpse = torch.ops.ascend._flash_attention_score_pse_grad(**arguments)
    return dq, dk, dv, dpse, query.new_empty(0, dtype=torch.float32)


def _lengths_on_host(query: Tensor, key: Tensor, options: Options) -> Options:
    """Without values, one sequence stands for all: shapes are the same."""
    lengths: dict[str, Sequence[int] | None] = {}
    for argument, x in (("actual_seq_lengths_query", query), ("actual_seq_lengths_key", key)):
        given = options[argument]
        unknown = given is not None and not has_values(given)
        lengths[argument] = [x.shape[0]] if unknown else lengths_of(given)
    return lengths


def _scores(query: Tensor, key: Tensor, options: Options) -> int:
    return number_of_scores(
        query, key, options["num_heads"], options["layout"], options["actual_seq_lengths_query"],
        options["actual_seq_lengths_key"],
    )  # fmt: skip


def _with_ropes(
    name: str,
    options: Options,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """With the ropes as further channels of each head: the scores are the sum of both products."""
    check_ropes(name, query_rope, key_rope)
    if query_rope is None or key_rope is None:
        return query, key
    axes = _axes_of_heads(options, query, query), _axes_of_heads(options, query, key)
    pairs = (query, query_rope), (key, key_rope)
    joined_query, joined_key = (
        torch.cat([x.unflatten(-1, heads) for x in pair], -1).flatten(-len(heads))
        for pair, heads in zip(pairs, axes, strict=True)
    )
    return joined_query, joined_key


def _without_rope(
    options: Options, query: Tensor, gradient: Any, x: Tensor, rope: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of what `_with_ropes` joined."""
    if rope is None:
        return gradient, None
    heads = _axes_of_heads(options, query, x)
    size = rope.unflatten(-1, heads).shape[-1]
    both = gradient.unflatten(-1, heads)
    parts = both[..., :-size], both[..., -size:]
    d_x, d_rope = (part.flatten(-len(heads)).contiguous() for part in parts)
    return d_x, d_rope


def _axes_of_heads(options: Options, query: Tensor, x: Tensor) -> tuple[int, ...]:
    """The axes that the last one of query or key stands for: heads and channels, in BSH and SBH."""
    if options["layout"] not in ("BSH", "SBH"):
        return (-1,)
    return x.shape[-1] // max(query.shape[-1] // options["num_heads"], 1), -1
