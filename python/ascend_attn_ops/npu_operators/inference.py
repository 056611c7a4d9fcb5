"""npu_prompt_flash_attention, npu_incre_flash_attention and npu_fused_infer_attention_score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_attn_ops.npu_operators.attention import Inputs, Keys, attend
from ascend_attn_ops.npu_operators.kernels import computes, unsupported
from ascend_attn_ops.npu_operators.layouts import LAYOUTS, layout_of

_PROMPT_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "NSD")
_STEP_LAYOUTS = ("BSH", "BSND", "BNSD")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@computes("npu_prompt_flash_attention")
def npu_prompt_flash_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    deq_scale1: Tensor | None,
    quant_scale1: Tensor | None,
    deq_scale2: Tensor | None,
    quant_scale2: Tensor | None,
    quant_offset2: Tensor | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    actual_seq_lengths_kv: Sequence[int] | None,
    sparse_mode: int,
) -> Tensor:
    layout_of("npu::npu_prompt_flash_attention", input_layout, _PROMPT_LAYOUTS)
    tensors, layout = [query, key, value], input_layout
    if input_layout == "NSD":  # one sequence
        tensors, layout = [x[None] for x in tensors], "BNSD"
    out = torch.ops.ascend.prompt_flash_attention(
        *tensors, num_heads=num_heads, atten_mask=atten_mask,
        actual_seq_lengths_query=actual_seq_lengths, actual_seq_lengths_key=actual_seq_lengths_kv,
        deq_scale1=deq_scale1, quant_scale1=quant_scale1, deq_scale2=deq_scale2,
        quant_scale2=quant_scale2, quant_offset2=quant_offset2, scale_value=scale_value,
        pre_tokens=pre_tokens, next_tokens=next_tokens, layout=layout,
        num_key_value_heads=num_key_value_heads, sparse_mode=sparse_mode,
    )  # fmt: skip
    return out[0] if input_layout == "NSD" else out


@computes("npu_incre_flash_attention", without_effect=("inner_precise",))
def npu_incre_flash_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    block_table: Tensor | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    block_size: int,
) -> Tensor:
    name = "npu::npu_incre_flash_attention"
    layout = layout_of(name, input_layout, _STEP_LAYOUTS)
    _refuse_quantised(name, query=query, key=key, value=value)
    tokens = query.shape["BNSD".index("S") if input_layout == "BNSD" else 1]
    if tokens != 1:
        raise ValueError(
            f"{name}: query: expected one token of each sequence, got {list(query.shape)}"
        )
    keys = Keys(key, value, None, num_key_value_heads or num_heads, block_table, block_size)
    inputs = Inputs(
        name, query, None, keys, num_heads, layout, scale_value, atten_mask, None,
        actual_seq_lengths,
    )  # fmt: skip
    return attend(inputs)[0]


@computes("npu_fused_infer_attention_score", without_effect=("inner_precise",))
def npu_fused_infer_attention_score(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    actual_seq_lengths_kv: Sequence[int] | None,
    block_table: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    num_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    block_size: int,
    softmax_lse_flag: bool,
) -> tuple[Tensor, Tensor]:
    name = "npu::npu_fused_infer_attention_score"
    _refuse_quantised(name, query=query, key=key, value=value)
    keys = Keys(key, value, key_rope, num_key_value_heads or num_heads, block_table, block_size)
    inputs = Inputs(
        name, query, query_rope, keys, num_heads, layout_of(name, input_layout, tuple(LAYOUTS)),
        scale, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, sparse_mode, pre_tokens,
        next_tokens,
    )  # fmt: skip
    out, lse = attend(inputs)
    return out, lse if softmax_lse_flag else lse.new_empty(0)


@computes("npu_fused_infer_attention_score_v2", without_effect=("inner_precise",))
def npu_fused_infer_attention_score_v2(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    block_table: Tensor | None,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    name = "npu::npu_fused_infer_attention_score_v2"
    _refuse_quantised(name, query=query, key=key, value=value)
    heads = num_key_value_heads or num_query_heads
    keys = Keys(key, value, key_rope, heads, block_table, block_size)
    inputs = Inputs(
        name, query, query_rope, keys, num_query_heads,
        layout_of(name, input_layout, tuple(LAYOUTS)), softmax_scale, atten_mask, actual_seq_qlen,
        actual_seq_kvlen, sparse_mode, pre_tokens, next_tokens,
    )  # fmt: skip
    out, lse = attend(inputs)
    return out, lse if return_softmax_lse else lse.new_empty(0)


def _refuse_quantised(name: str, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise unsupported(name, argument, "float16 or bfloat16", tensor)
