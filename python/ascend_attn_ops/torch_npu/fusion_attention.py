"""npu_fusion_attention, its versions and their gradients: what flash_attention_score lacks.

That is dropout by seed and offset, and the order of a pack's statistics. In _v3, which is made for
graphs, what is drawn and the lengths are tensors. The operators are called, not the public
functions: torch_npu builds no mask, and its scale is 1. `options` are arguments of
flash_attention_score or of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import has_values, wrong
from ascend_attn_ops._core.packing import Lengths, lengths_of, lengths_tensor
from ascend_attn_ops._core.statistics import by_sequence, by_token
from ascend_attn_ops.ops._dense_attention import number_of_scores
from ascend_attn_ops.torch_npu.dropout import drop_mask as mask_of
from ascend_attn_ops.torch_npu.translation import unsupported

_LAST_SEED = 2**62
Options = dict[str, Any]


def forward(
    name: str, query: Tensor, key: Tensor, value: Tensor, softmax_layout: str,
    drop_mask: Tensor | None = None, seed: int = 0, offset: int = 0, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    if drop_mask is None and (seed or offset):
        raise unsupported(name, "seed", "0 without a dropout_mask, as it is drawn", (seed, offset))
    scores = _scores(query, key, options)
    if drop_mask is None and options["keep_prob"] < 1:
        drawn = torch.randint(1, _LAST_SEED, (), device=query.device)
        # In a graph the number would be a constant: 0, as torch_npu has it there.
        seed = int(drawn.item()) if has_values(query) else 0
        drop_mask = mask_of(scores, options["keep_prob"], drawn, offset, query.device)
    results = _attention(name, query, key, value, softmax_layout, drop_mask, options)
    return *results, query.new_empty(0), seed, offset, scores


def forward_v3(
    name: str, query: Tensor, key: Tensor, value: Tensor, softmax_layout: str, **options: Any
) -> tuple[Tensor, ...]:
    options["prefix"] = lengths_tensor(options["prefix"])
    seed, offset = (torch.zeros(1, dtype=torch.int64, device=query.device) for _ in range(2))
    keep_prob, mask = options["keep_prob"], None
    if keep_prob < 1:
        seed = torch.randint(1, _LAST_SEED, (1,), device=query.device)
        mask = mask_of(_scores(query, key, options), keep_prob, seed, offset, query.device)
    results = _attention(name, query, key, value, softmax_layout, mask, options)
    return *results, query.new_empty(0), seed, offset


def _attention(
    name: str, query: Tensor, key: Tensor, value: Tensor, softmax_layout: str, mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns out, softmax_max and softmax_sum."""
    ordered_by_token = _ordered_by_token(name, softmax_layout, options)
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
        got = f"{softmax_layout!r} in input_layout {options['layout']}"
        raise wrong(ValueError, name, "softmax_layout", "'', or 'TND' in input_layout TND", got)
    return softmax_layout == "TND"


def grad_v2(
    name: str, query: Tensor, softmax_in: Tensor | None, softmax_layout: str, seed: int,
    offset: int, numels: int, **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dpse, dq_rope, dk_rope and d_sink."""
    mask = None
    if options["keep_prob"] != 1:
        if seed == offset == 0 and has_values(query):
            got = "0 and 0, as compiled code returns; npu_fusion_attention_v3 returns tensors there"
            raise wrong(ValueError, name, "seed", "seed and offset from an eager forward", got)
        # The one that the forward drew.
        mask = mask_of(numels, options["keep_prob"], seed, offset, query.device)
    return _gradients(name, query, softmax_in, softmax_layout, mask, options)


@wraps(grad_v2)
def grad(**arguments: Any) -> tuple[Tensor | None, ...]:
    *gradients, _, _, d_sink = grad_v2(**arguments)
    return *gradients, d_sink


def grad_v3(
    name: str, query: Tensor, key: Tensor, softmax_in: Tensor | None, softmax_layout: str,
    seed: Tensor | None, offset: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    options |= {"key": key, "prefix": lengths_tensor(options["prefix"])}
    keep_prob, mask = options["keep_prob"], None
    if keep_prob < 1:
        if seed is None or offset is None:
            missing = "seed" if seed is None else "offset"
            raise wrong(ValueError, name, missing, "that of the forward", "None")
        mask = mask_of(_scores(query, key, options), keep_prob, seed, offset, query.device)
    dq, dk, dv, dpse, _, _, d_sink = _gradients(
        name, query, softmax_in, softmax_layout, mask, options
    )
    # torch_npu's fake tensors have an empty one, too.
    return dq, dk, dv, query.new_empty(0) if dpse is None else dpse, d_sink


def _gradients(
    name: str, query: Tensor, softmax_in: Tensor | None, softmax_layout: str, mask: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:  # fmt: skip
    """As `grad_v2`. Without a bias dpse is None, without ropes theirs are, without a sink d_sink is
    empty."""
    if softmax_in is not None and softmax_in.numel():
        raise unsupported(name, "softmax_in", "the empty tensor of the forward", softmax_in)
    for argument in ("softmax_max", "softmax_sum", "attention_in"):
        if options[argument] is None:
            raise wrong(ValueError, name, argument, "the result of the forward", "None")
    arguments = {**options, "query": query, "drop_mask": mask}
    if _ordered_by_token(name, softmax_layout, options):
        arguments |= _ordered_by_sequence(options)
    pse_grad = options["pse_shift"] is not None and options.get("pse_type", 1) <= 1
    dq, dk, dv, d_sink, *ropes, dpse = torch.ops.ascend._flash_attention_score_extended_grad(
        **arguments, pse_grad=pse_grad
    )
    if options.get("query_rope") is None:
        ropes = [None, None]
    return dq, dk, dv, dpse if pse_grad else None, *ropes, d_sink


def _ordered_by_sequence(options: Options) -> Options:
    """The statistics in our order. The operator refuses lengths and shapes that do not fit."""
    statistics = {x: options[x] for x in ("softmax_max", "softmax_sum")}
    ends = _known(options["actual_seq_lengths_query"], statistics["softmax_max"])
    return {
        name: by_sequence(x.transpose(0, 1), ends)
        for name, x in statistics.items()
        if x.dim() == 3 and all(end <= x.shape[0] for end in ends)
    }


def _known(ends: Lengths, x: Tensor) -> Sequence[int]:
    """The ends as a list. Without values, one sequence stands for all: shapes are the same."""
    if isinstance(ends, Tensor) and not has_values(ends):
        return [x.shape[0]]
    return lengths_of(ends) or ()


def _scores(query: Tensor, key: Tensor, options: Options) -> int:
    return number_of_scores(
        query, key, options["num_heads"], options["layout"],
        _known(options["actual_seq_lengths_query"], query),
        _known(options["actual_seq_lengths_key"], key),
    )  # fmt: skip
