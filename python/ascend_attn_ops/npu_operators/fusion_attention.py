"""npu_fusion_attention, its versions and their gradients: what flash_attention_score lacks.

That is dropout by seed and offset, and the order of a pack's statistics. In _v3, which is made for
graphs, what is drawn and the lengths are tensors. The operators are called, not the public
functions: torch_npu builds no mask, and its scale is 1. `options` are arguments of
flash_attention_score or of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._dense_attention import number_of_scores
from ascend_attn_ops._packing import lengths_of
from ascend_attn_ops._statistics import by_sequence, by_token
from ascend_attn_ops._torch import below_autograd
from ascend_attn_ops.npu_operators.dropout import drop_mask as mask_of
from ascend_attn_ops.npu_operators.layouts import check_ropes
from ascend_attn_ops.npu_operators.translation import has_values, unsupported

_LAST_SEED = 2**62
# Arguments that the public operator of the gradient lacks.
_EXTRA = ("sink", "query_rope", "key_rope")
Options = dict[str, Any]


def forward(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_layout: str,
    drop_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    if drop_mask is None and (seed or offset):
        raise unsupported(name, "seed", "0 without a dropout_mask, as it is drawn", (seed, offset))
    ordered_by_token = _ordered_by_token(name, softmax_layout, options)
    scores = _scores(query, key, options)
    if drop_mask is None and options["keep_prob"] < 1:
        drawn = torch.randint(1, _LAST_SEED, (), device=query.device)
        # In a graph the number would be a constant: 0, as torch_npu has it there.
        seed = int(drawn.item()) if has_values(query) else 0
        drop_mask = mask_of(scores, options["keep_prob"], drawn, offset, query.device)
    results = _attention(query, key, value, drop_mask, ordered_by_token, options)
    return *results, query.new_empty(0), seed, offset, scores


def forward_v2(
    name: str,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    softmax_layout: str,
    seed: int = 0,
    offset: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    check_ropes(name, query_rope, key_rope)
    options |= {"query_rope": query_rope, "key_rope": key_rope}
    options |= {"softmax_layout": softmax_layout, "seed": seed, "offset": offset}
    return forward(name, query, key, **options)


def forward_v3(
    name: str, query: Tensor, key: Tensor, value: Tensor, softmax_layout: str, **options: Any
) -> tuple[Tensor, ...]:
    ordered_by_token = _ordered_by_token(name, softmax_layout, options)
    options |= _lengths_on_host(query, key, options)
    seed, offset = (torch.zeros(1, dtype=torch.int64, device=query.device) for _ in range(2))
    keep_prob, mask = options["keep_prob"], None
    if keep_prob < 1:
        seed = torch.randint(1, _LAST_SEED, (1,), device=query.device)
        mask = mask_of(_scores(query, key, options), keep_prob, seed, offset, query.device)
    results = _attention(query, key, value, mask, ordered_by_token, options)
    return *results, query.new_empty(0), seed, offset


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ordered_by_token: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, softmax_max and softmax_sum."""
    out, maximum, total = torch.ops.ascend.flash_attention_score(
        query, key, value, drop_mask=mask, **options
    )
    if ordered_by_token:
        ends = options["actual_seq_lengths_query"]
        maximum, total = (by_token(x, ends).contiguous() for x in (maximum, total))
    return out, maximum, total


def _ordered_by_token(name: str, softmax_layout: str, options: Options) -> bool:
    """Whether a pack's statistics hold one token after another, not one sequence after another."""
    if softmax_layout not in ("", "TND") or (softmax_layout and options["layout"] != "TND"):
        raise ValueError(
            f"{name}: softmax_layout: expected '', or 'TND' in input_layout TND, got "
            f"{softmax_layout!r} in input_layout {options['layout']}"
        )
    return softmax_layout == "TND"


def grad(
    name: str,
    query: Tensor,
    key: Tensor,
    softmax_in: Tensor | None,
    softmax_layout: str,
    seed: int,
    offset: int,
    numels: int,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    mask = _mask_again(name, query, seed, offset, numels, options)
    return _gradients(name, query, key, softmax_in, softmax_layout, mask, options)[:5]


def grad_v2(
    name: str,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    softmax_in: Tensor | None,
    softmax_layout: str,
    seed: int,
    offset: int,
    numels: int,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    check_ropes(name, query_rope, key_rope)
    mask = _mask_again(name, query, seed, offset, numels, options)
    options |= {"query_rope": query_rope, "key_rope": key_rope}
    *gradients, d_sink, dq_rope, dk_rope = _gradients(
        name, query, key, softmax_in, softmax_layout, mask, options
    )
    ropes = (None, None) if query_rope is None else (dq_rope, dk_rope)
    return *gradients, *ropes, d_sink


def _mask_again(
    name: str, query: Tensor, seed: int, offset: int, numels: int, options: Options
) -> Tensor | None:
    """The mask that the forward drew."""
    if options["keep_prob"] == 1:
        return None
    if seed == offset == 0 and has_values(query):
        raise ValueError(
            f"{name}: seed: expected the seed and offset that the forward returned, got 0 and "
            "0, which it returns where it is compiled; npu_fusion_attention_v3 returns tensors "
            "there"
        )
    return mask_of(numels, options["keep_prob"], seed, offset, query.device)


def grad_v3(
    name: str,
    query: Tensor,
    key: Tensor,
    softmax_in: Tensor | None,
    softmax_layout: str,
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
    dq, dk, dv, dpse, d_sink, *_ = _gradients(
        name, query, key, softmax_in, softmax_layout, mask, options
    )
    # torch_npu's fake tensors have an empty one, too.
    return dq, dk, dv, query.new_empty(0) if dpse is None else dpse, d_sink


def autograd_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse: Tensor | None,
    sink: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    return _FusionAttentionV3.apply(options, query, key, value, pse, sink)


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
        sink: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            outputs = torch.ops.npu.npu_fusion_attention_v3(
                query, key, value, pse=pse, sink=sink, **options
            )
        ctx.save_for_backward(query, key, value, pse, sink, *outputs)
        ctx.options = {**options, "scale_value": options["scale"]}
        del ctx.options["scale"]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        query, key, value, pse, sink, out, maximum, total, softmax, seed, offset = saved
        dq, dk, dv, dpse, d_sink = torch.ops.npu.npu_fusion_attention_grad_v3(
            query, key, value, d_outputs[0], pse=pse, softmax_max=maximum, softmax_sum=total,
            softmax_in=softmax, attention_in=out, seed=seed, offset=offset, sink=sink,
            **ctx.options,
        )  # fmt: skip
        d_pse = dpse if ctx.needs_input_grad[4] else None
        return None, dq, dk, dv, d_pse, None if sink is None else d_sink


def _gradients(
    name: str,
    query: Tensor,
    key: Tensor,
    softmax_in: Tensor | None,
    softmax_layout: str,
    mask: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """dq, dk, dv, dpse, d_sink, dq_rope, dk_rope. Without a bias dpse is None, the others empty."""
    if softmax_in is not None and softmax_in.numel():
        raise unsupported(name, "softmax_in", "the empty tensor of the forward", softmax_in)
    for argument in ("softmax_max", "softmax_sum", "attention_in"):
        if options[argument] is None:
            raise ValueError(f"{name}: {argument}: expected the result of the forward, got None")
    if _ordered_by_token(name, softmax_layout, options):
        options = {**options, **_ordered_by_sequence(options)}
    arguments = {**options, "query": query, "key": key, "drop_mask": mask}
    if any(arguments.get(name) is not None for name in _EXTRA):
        found = torch.ops.ascend._flash_attention_score_extended_grad(**arguments)
    else:
        plain = {name: x for name, x in arguments.items() if name not in _EXTRA}
        absent = query.new_empty(0)
        found = (
            *torch.ops.ascend.flash_attention_score_grad(**plain), absent.float(), absent, absent,
        )  # fmt: skip
    dq, dk, dv, d_sink, dq_rope, dk_rope = found
    dpse = None
    if options["pse_shift"] is not None and options.get("pse_type", 1) <= 1:
        dpse = torch.ops.ascend._flash_attention_score_pse_grad(**arguments)
    return dq, dk, dv, dpse, d_sink, dq_rope, dk_rope


def _ordered_by_sequence(options: Options) -> Options:
    """The statistics in our order. The operator refuses lengths and shapes that do not fit."""
    statistics = {x: options[x] for x in ("softmax_max", "softmax_sum")}
    ends = options["actual_seq_lengths_query"] or ()
    return {
        name: by_sequence(x.transpose(0, 1), ends)
        for name, x in statistics.items()
        if x.dim() == 3 and all(end <= x.shape[0] for end in ends)
    }


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
