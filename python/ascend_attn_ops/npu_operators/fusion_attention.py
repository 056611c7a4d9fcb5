"""npu_fusion_attention and _v2, and their gradients: flash_attention_score by torch_npu's names.

They call the operators, not the public functions: torch_npu builds no mask, and its scale is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._dense_attention import number_of_scores
from ascend_attn_ops.npu_operators.dropout import drop_mask
from ascend_attn_ops.npu_operators.kernels import computes, has_values, unsupported
from ascend_attn_ops.npu_operators.layouts import joined_heads, split_heads

# How the device makes the mask of dropout, which does not change it.
HOW_MASKS_ARE_MADE = ("gen_mask_parallel", "sync")
LAST_SEED = 2**62


class Call(NamedTuple):
    """What forward and gradient share, by the names of flash_attention_score."""

    num_heads: int
    layout: str
    pse_shift: Tensor | None
    atten_mask: Tensor | None
    prefix: Sequence[int] | None
    actual_seq_lengths_query: Sequence[int] | None
    actual_seq_lengths_key: Sequence[int] | None
    scale_value: float
    keep_prob: float
    pre_tokens: int
    next_tokens: int
    inner_precise: int
    sparse_mode: int
    pse_type: int = 1
    q_start_idx: Sequence[int] | None = None
    kv_start_idx: Sequence[int] | None = None

    def scores(self, query: Tensor, key: Tensor) -> int:
        lengths = (self.actual_seq_lengths_query, self.actual_seq_lengths_key)
        return number_of_scores(query, key, self.num_heads, self.layout, *lengths)


@computes("npu_fusion_attention", without_effect=HOW_MASKS_ARE_MADE, differentiable=True)
def npu_fusion_attention(
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
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    sparse_mode: int,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    call = Call(
        head_num, input_layout, pse, atten_mask, prefix, actual_seq_qlen, actual_seq_kvlen, scale,
        keep_prob, pre_tockens, next_tockens, inner_precise, sparse_mode,
    )  # fmt: skip
    name = "npu::npu_fusion_attention"
    return _forward(name, call, query, key, value, dropout_mask, seed, offset)


@computes("npu_fusion_attention_v2", without_effect=HOW_MASKS_ARE_MADE, differentiable=True)
def npu_fusion_attention_v2(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    inner_precise: int,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    sparse_mode: int,
    pse_type: int,
    q_start_idx: Sequence[int] | None,
    kv_start_idx: Sequence[int] | None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    call = Call(
        head_num, input_layout, pse, atten_mask, prefix, actual_seq_qlen, actual_seq_kvlen, scale,
        keep_prob, pre_tokens, next_tokens, inner_precise, sparse_mode, pse_type, q_start_idx,
        kv_start_idx,
    )  # fmt: skip
    name = "npu::npu_fusion_attention_v2"
    query, key = _with_ropes(name, call, query, key, query_rope, key_rope)
    return _forward(name, call, query, key, value, dropout_mask, seed, offset)


def _forward(
    name: str,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: int,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    if mask is None and (seed or offset):
        raise unsupported(name, "seed", "0 without a dropout_mask, as it is drawn", (seed, offset))
    if mask is None and call.keep_prob < 1:
        drawn = torch.randint(1, LAST_SEED, (), device=query.device)
        # In a graph the number would be a constant: 0, as torch_npu has it there.
        seed = int(drawn.item()) if has_values(query) else 0
        mask = drop_mask(call.scores(query, key), call.keep_prob, drawn, offset, query.device)
    out, maximum, total = torch.ops.ascend.flash_attention_score(
        query, key, value, drop_mask=mask, **call._asdict()
    )
    return out, maximum, total, query.new_empty(0), seed, offset, call.scores(query, key)


@computes("npu_fusion_attention_grad", without_effect=HOW_MASKS_ARE_MADE)
def npu_fusion_attention_grad(
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
    seed: int,
    offset: int,
    numels: int,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    sparse_mode: int,
) -> tuple[Tensor | None, ...]:
    call = Call(
        head_num, input_layout, pse, atten_mask, prefix, actual_seq_qlen, actual_seq_kvlen,
        scale_value, keep_prob, pre_tockens, next_tockens, inner_precise, sparse_mode,
    )  # fmt: skip
    name = "npu::npu_fusion_attention_grad"
    mask = _drawn_again(name, call, query, seed, offset, numels)
    saved = (softmax_max, softmax_sum, softmax_in, attention_in)
    return (*gradients(name, call, query, key, value, dy, saved, mask), no_sink(query))


@computes("npu_fusion_attention_grad_v2", without_effect=HOW_MASKS_ARE_MADE)
def npu_fusion_attention_grad_v2(
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
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    scale_value: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    inner_precise: int,
    seed: int,
    offset: int,
    numels: int,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    sparse_mode: int,
    pse_type: int,
    q_start_idx: Sequence[int] | None,
    kv_start_idx: Sequence[int] | None,
) -> tuple[Tensor | None, ...]:
    call = Call(
        head_num, input_layout, pse, atten_mask, prefix, actual_seq_qlen, actual_seq_kvlen,
        scale_value, keep_prob, pre_tokens, next_tokens, inner_precise, sparse_mode, pse_type,
        q_start_idx, kv_start_idx,
    )  # fmt: skip
    name = "npu::npu_fusion_attention_grad_v2"
    wide_query, wide_key = _with_ropes(name, call, query, key, query_rope, key_rope)
    mask = _drawn_again(name, call, query, seed, offset, numels)
    saved = (softmax_max, softmax_sum, softmax_in, attention_in)
    dq, dk, dv, dpse = gradients(name, call, wide_query, wide_key, value, dy, saved, mask)
    dq, dq_rope = _without_rope(call, dq, query_rope, _heads(call, query, query))
    dk, dk_rope = _without_rope(call, dk, key_rope, _heads(call, query, key))
    return dq, dk, dv, dpse, dq_rope, dk_rope, no_sink(query)


def _drawn_again(
    name: str, call: Call, query: Tensor, seed: int, offset: int, numels: int
) -> Tensor | None:
    if call.keep_prob == 1:
        return None
    if seed == offset == 0 and has_values(query):
        raise ValueError(
            f"{name}: seed: expected the seed and offset that the forward returned, got 0 and 0, "
            "which it returns where it is compiled; npu_fusion_attention_v3 returns tensors there"
        )
    return drop_mask(numels, call.keep_prob, seed, offset, query.device)


def gradients(
    name: str,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    saved: tuple[Tensor | None, ...],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dpse. `saved`: softmax_max, softmax_sum, softmax_in and attention_in."""
    maximum, total, softmax, out = saved
    if softmax is not None and softmax.numel():
        raise unsupported(name, "softmax_in", "the empty tensor of the forward", softmax)
    for argument, tensor in (
        ("softmax_max", maximum), ("softmax_sum", total), ("attention_in", out),
    ):  # fmt: skip
        if tensor is None:
            raise ValueError(f"{name}: {argument}: expected the result of the forward, got None")
    arguments = (query, key, value, dy, maximum, total, out)
    options = {**call._asdict(), "drop_mask": mask}
    dq, dk, dv = torch.ops.ascend.flash_attention_score_grad(*arguments, **options)
    if call.pse_shift is None or call.pse_type > 1:
        return dq, dk, dv, None
    return dq, dk, dv, torch.ops.ascend._flash_attention_score_pse_grad(*arguments, **options)


def no_sink(query: Tensor) -> Tensor:
    """In the place of the gradient of a sink."""
    return query.new_empty(0, dtype=torch.float32)


def _with_ropes(
    name: str,
    call: Call,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """With the ropes as further channels of each head: the scores are the sum of both products."""
    if (query_rope is None) != (key_rope is None):
        argument, got = ("query_rope", query_rope) if query_rope is None else ("key_rope", key_rope)
        raise ValueError(f"{name}: {argument}: expected beside the other rope, got {got}")
    if query_rope is None or key_rope is None:
        return query, key
    joined = []
    for x, rope in ((query, query_rope), (key, key_rope)):
        heads = _heads(call, query, x)
        parts = [split_heads(part, call.layout, heads) for part in (x, rope)]
        joined.append(joined_heads(torch.cat(parts, -1), call.layout))
    return joined[0], joined[1]


def _without_rope(
    call: Call, gradient: Tensor, rope: Tensor | None, heads: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of what `_with_ropes` joined."""
    if rope is None:
        return gradient, None
    size = split_heads(rope, call.layout, heads).shape[-1]
    both = split_heads(gradient, call.layout, heads)
    x, y = both[..., :-size], both[..., -size:]
    return joined_heads(x, call.layout).contiguous(), joined_heads(y, call.layout).contiguous()


def _heads(call: Call, query: Tensor, tensor: Tensor) -> int:
    """The heads of query or key, where they share an axis with the head size."""
    return tensor.shape[-1] // max(query.shape[-1] // call.num_heads, 1)
