"""npu_prompt_flash_attention, npu_incre_flash_attention and npu_fused_infer_attention_score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops.npu_operators.translation import unsupported

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32, torch.float64)


def prompt(query: Tensor, key: Tensor, value: Tensor, layout: str, **options: Any) -> Tensor:
    tensors = (query, key, value)
    if layout != "NSD":
        return torch.ops.ascend.prompt_flash_attention(*tensors, layout=layout, **options)
    one_sequence = [x[None] for x in tensors]
    return torch.ops.ascend.prompt_flash_attention(*one_sequence, layout="BNSD", **options)[0]


def one_token(name: str, query: Tensor, layout: str, **options: Any) -> Tensor:
    if query.shape[2 if layout == "BNSD" else 1] != 1:
        raise ValueError(
            f"{name}: query: expected one token of each sequence, got {list(query.shape)}"
        )
    return fused(name, query, layout=layout, **options)[0]


def fused(
    name: str, query: Tensor, key: Tensor, value: Tensor, layout: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns out and lse, which is +inf in rows without keys as torch_npu's is."""
    tensors = {"query": query, "key": key, "value": value}
    for argument, x in tensors.items():
        if x.dtype not in _FLOATS:
            raise unsupported(name, argument, "float16 or bfloat16", x)
    sink = options.get("sink")
    if sink is not None and sink.dtype not in _HALVES:
        raise unsupported(name, "learnable_sink", "float16 or bfloat16", sink)
    tensors |= {x: options[x] for x in ("query_rope", "key_rope") if options.get(x) is not None}
    if layout == "NSD":
        in_pages = options["block_table"] is not None
        tensors = {
            argument: x if in_pages and not argument.startswith("query") else x[None]
            for argument, x in tensors.items()
        }
    of_operator = {"NSD": "BNSD", "NTD": "NTD_TND"}.get(layout, layout)
    out, lse = torch.ops.ascend.fused_infer_attention_score(
        **{**options, **tensors}, layout=of_operator
    )
    if layout == "NSD":
        out = out[0]
    if layout == "NTD":
        out = out.transpose(0, 1).contiguous()
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)
