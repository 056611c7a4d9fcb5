"""torch_npu's operators for inference, and their forms for graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import shown, wrong
from ascend_attn_ops._core.operators import signature_of
from ascend_attn_ops._core.statistics import log_sum_exp_or
from ascend_attn_ops.torch_npu.translation import unsupported

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
        got = str(list(query.shape))
        raise wrong(ValueError, name, "query", "one token of each sequence", got)
    return fused(name, query, layout=layout, **options)[0]


def fused(
    name: str, query: Tensor, key: Tensor, value: Tensor, layout: str,
    pse_shift: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out and lse, which is +inf in rows without keys as torch_npu's is."""
    tensors = {"query": query, "key": key, "value": value}
    for argument, x in tensors.items():
        scale = "dequant_scale_query" if argument == "query" else "key_antiquant_scale"
        if x.dtype not in _FLOATS and options.get(scale) is None:
            raise unsupported(name, argument, "float16 or bfloat16", x)
    sink = options.get("sink")
    if sink is not None and sink.dtype not in _HALVES:
        raise unsupported(name, "learnable_sink", "float16 or bfloat16", sink)
    if pse_shift is not None:
        return _biased(name, tensors, layout, pse_shift, options)
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


def _biased(
    name: str, tensors: dict[str, Tensor], layout: str, pse_shift: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """By flash_attention_score, which has a bias: without pages, ropes and packs."""
    if layout not in ("BSH", "BSND", "BNSD"):
        raise unsupported(name, "pse_shift", f"None in layout {layout}", pse_shift)
    for argument in ("block_table", "query_rope", "key_rope", "key_antiquant_scale"):
        if options.get(argument) is not None:
            raise unsupported(name, argument, "None beside pse_shift", options[argument])
    parameters = signature_of("flash_attention_score").parameters
    same = {x: y for x, y in options.items() if x in parameters and x != "inner_precise"}
    if same.get("atten_mask") is not None:
        same["atten_mask"] = same["atten_mask"].bool()
    out, *statistics = torch.ops.ascend.flash_attention_score(
        **tensors, layout=layout, pse_shift=pse_shift, pse_type=0, **same
    )
    return out, log_sum_exp_or(torch.inf, *(x[..., :1] for x in statistics))


def fused_out(
    name: str, out: Sequence[Tensor], return_softmax_lse: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """`fused` into `out`, whose second tensor has any shape unless the log-sum-exp is wanted."""
    if len(out) != 2:
        raise wrong(ValueError, name, "out", "two tensors", str(len(out)))
    results = fused(name, return_softmax_lse=return_softmax_lse, **options)
    _write(name, out[: 1 + return_softmax_lse], results)
    return out[0], out[1]


def paged(
    name: str, query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int,
    num_heads: int, scale_value: float, block_table: Tensor, context_lens: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """One token of each sequence, (B, N, D), over pages of (blocks, block_size, Nk, D)."""
    result, _ = torch.ops.ascend.fused_infer_attention_score(
        query.unsqueeze(1), key_cache.flatten(2), value_cache.flatten(2), layout="BSND",
        num_heads=num_heads, num_key_value_heads=num_kv_heads, scale_value=scale_value,
        block_table=block_table, actual_seq_lengths_key=context_lens,
    )  # fmt: skip
    _write(name, [out], [result.squeeze(1)])


def workspace(query: Tensor, **options: Any) -> Tensor:
    """The memory that a launch needs: none here."""
    return query.new_empty(0, dtype=torch.uint8)


def _write(name: str, into: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    pairs = list(zip(into, results, strict=False))
    for given, result in pairs:
        if given.shape != result.shape or given.dtype != result.dtype:
            raise wrong(ValueError, name, "out", shown(result), shown(given))
    for given, result in pairs:
        given.copy_(result)
