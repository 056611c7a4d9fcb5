"""npu_prompt_flash_attention, npu_incre_flash_attention and npu_fused_infer_attention_score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops.npu_operators.attention import Inputs, attend
from ascend_attn_ops.npu_operators.translation import unsupported

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def prompt(query: Tensor, key: Tensor, value: Tensor, layout: str, **options: Any) -> Tensor:
    tensors = (query, key, value)
    if layout != "NSD":
        return torch.ops.ascend.prompt_flash_attention(*tensors, layout=layout, **options)
    one_sequence = [x[None] for x in tensors]
    return torch.ops.ascend.prompt_flash_attention(*one_sequence, layout="BNSD", **options)[0]


def one_token(**arguments: Any) -> Tensor:
    inputs = _without_quantisation(arguments)
    if inputs.query.shape[2 if inputs.layout == "BNSD" else 1] != 1:
        raise ValueError(
            f"{inputs.name}: query: expected one token of each sequence, "
            f"got {list(inputs.query.shape)}"
        )
    return attend(inputs)[0]


def fused(**arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = _without_quantisation(arguments)
    out, lse = attend(inputs)
    return out, lse if inputs.return_softmax_lse else lse.new_empty(0)


def _without_quantisation(arguments: dict[str, Any]) -> Inputs:
    for argument in ("query", "key", "value"):
        if arguments[argument].dtype not in _FLOATS:
            expected = "float16 or bfloat16"
            raise unsupported(arguments["name"], argument, expected, arguments[argument])
    return Inputs(**arguments)
