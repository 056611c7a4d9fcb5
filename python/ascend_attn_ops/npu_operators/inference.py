"""npu_prompt_flash_attention, npu_incre_flash_attention and npu_fused_infer_attention_score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops.npu_operators.attention import Inputs, attend, check_mode, check_sink
from ascend_attn_ops.npu_operators.layouts import LAYOUTS
from ascend_attn_ops.npu_operators.translation import unsupported

# The first of the modes whose mask is compressed, and what the blocks of a cache are multiples of.
_FIRST_COMPRESSED_MODE, _BLOCK, _FRACTAL = 2, 16, 16

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
    return _attend(inputs)[0]


def fused(**arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = _without_quantisation(arguments)
    out, lse = _attend(inputs)
    return out, lse if inputs.return_softmax_lse else lse.new_empty(0)


def _attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
    check_mode(inputs)
    return _by_operator(inputs) if _is_ours(inputs) else attend(inputs)


def _is_ours(inputs: Inputs) -> bool:
    """Whether fused_infer_attention_score takes a call. It reads pages where they lie.

    It refuses calls that no device computes, such as those with blocks of other sizes.
    """
    layout, mask, table = LAYOUTS[inputs.layout], inputs.atten_mask, inputs.block_table
    if layout.packed:
        whole = [(inputs.query, inputs.actual_seq_lengths_query)]
        whole += [(inputs.key, inputs.actual_seq_lengths_key)] if table is None else []
        axis = 1 if layout.inputs == "NTD" else 0
        if not all(ends and ends[-1] == x.shape[axis] for x, ends in whole):
            return False
        if mask is not None and inputs.sparse_mode < _FIRST_COMPRESSED_MODE:
            return False
    if table is None:
        return True
    slots = {3: 1, 4: 2, 5: 3}.get(inputs.key.dim())
    fractal = inputs.key.dim() == 5 and inputs.key.shape[4] != _FRACTAL
    counts = inputs.actual_seq_lengths_key or ()
    return (
        slots is not None
        and not fractal
        and inputs.key.shape[slots] % _BLOCK == 0
        and len(counts) == len(table)
    )


def _by_operator(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns out and lse, which is +inf in rows without keys as torch_npu's is."""
    given = inputs._asdict()
    one_sequence, transposed = inputs.layout == "NSD", inputs.layout == "NTD"
    if one_sequence:
        names = ["query", "query_rope"]
        names += ["key", "value", "key_rope"] if inputs.block_table is None else []
        given |= {name: given[name][None] for name in names if given[name] is not None}
        given["layout"] = "BNSD"
    if transposed:
        given["layout"] = "NTD_TND"
    if inputs.sink is not None:
        check_sink(inputs.name, inputs.sink)
        given["sink"] = inputs.sink.float()
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    del given["name"]
    out, lse = torch.ops.ascend.fused_infer_attention_score(query, key, value, **given)
    if one_sequence:
        out = out[0]
    if transposed:
        out = out.transpose(0, 1).contiguous()
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _without_quantisation(arguments: dict[str, Any]) -> Inputs:
    for argument in ("query", "key", "value"):
        if arguments[argument].dtype not in _FLOATS:
            expected = "float16 or bfloat16"
            raise unsupported(arguments["name"], argument, expected, arguments[argument])
    return Inputs(**arguments)
