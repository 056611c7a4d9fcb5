"""The merge of attention results, by torch_npu's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import has_values, shown, wrong
from ascend_attn_ops._core.statistics import by_token, merge
from ascend_attn_ops.torch_npu.translation import unsupported


def attention_update(
    name: str, lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor | None]:
    if update_type not in (0, 1):
        expected = "0, or 1 for lse_out as well"
        raise wrong(ValueError, name, "update_type", expected, str(update_type))
    out, lse_out = torch.ops.ascend.attention_update(lse, local_out)
    return out, lse_out if update_type == 1 else None


def ring_attention_update(
    name: str, prev_attn_out: Tensor, prev_softmax_max: Tensor, prev_softmax_sum: Tensor,
    cur_attn_out: Tensor, cur_softmax_max: Tensor, cur_softmax_sum: Tensor,
    actual_seq_lengths_query: Tensor | None, layout: str, input_softmax_layout: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if prev_attn_out.shape != cur_attn_out.shape or prev_attn_out.dtype != cur_attn_out.dtype:
        expected = f"shape and dtype of prev_attn_out, {shown(prev_attn_out)}"
        raise wrong(ValueError, name, "cur_attn_out", expected, shown(cur_attn_out))
    maximum, total, shares = merge(
        (prev_softmax_max, prev_softmax_sum), (cur_softmax_max, cur_softmax_sum)
    )
    merged = torch.zeros_like(prev_attn_out, dtype=maximum.dtype)
    for out, repeated in zip((prev_attn_out, cur_attn_out), shares, strict=True):
        share = repeated[..., 0]
        if layout == "SBH":
            share = share.permute(2, 0, 1)  # (S, B, N)
        elif layout == "TND":
            share = _packed(name, share, actual_seq_lengths_query, input_softmax_layout)
        else:
            raise unsupported(name, "input_layout", "SBH or TND", layout)
        heads = out.unflatten(2, (share.shape[2], -1)) if layout == "SBH" else out
        merged += (heads * share[..., None]).view_as(merged)
    return merged.to(prev_attn_out.dtype), maximum, total


def _packed(name: str, share: Tensor, cu_seqlens: Tensor | None, layout: str) -> Tensor:
    """(T, N), from statistics that hold (N, length) of one sequence after another unless their
    layout is TND as well."""
    if layout == "TND":
        return share
    if layout:
        raise unsupported(name, "input_softmax_layout", "TND or none", layout)
    if cu_seqlens is None:
        raise wrong(ValueError, name, "actual_seq_qlen", "lengths in layout TND", "None")
    tokens = len(share)
    # It counts from 0. Without values, one sequence stands for all: shapes are the same.
    ends = cu_seqlens.tolist() if has_values(cu_seqlens) else [0, tokens]
    if not ends or ends[0] != 0 or ends[-1] != tokens:
        expected = f"cumulative sequence lengths from 0 to T = {tokens}"
        raise wrong(ValueError, name, "actual_seq_qlen", expected, shown(ends))
    return by_token(share, ends[1:])
