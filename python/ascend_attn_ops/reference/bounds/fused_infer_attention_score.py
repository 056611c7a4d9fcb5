"""Bounds on the results of fused_infer_attention_score."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
    largest_score,
    magnitude,
    of_lse,
    within,
)
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.operators.flash_attention_score import to_heads
from ascend_attn_ops.reference.operators.fused_infer_attention_score import layouts, pages_by_head


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    out, lse = exact.call(reference)
    # Also of int8, whose least number has no absolute value there.
    sizes = {"value": magnitude(exact.inputs["value"].double())}
    if exact.options.get("value_antiquant_scale") is not None:
        sizes["value_antiquant_scale"] = magnitude(exact.options["value_antiquant_scale"])
    terms, _ = exact.replace(**sizes).call(reference)
    largest = largest_score_of(sample)
    return [within("out", out, terms, dtype, largest), of_lse(lse, dtype, largest)]


def largest_score_of(sample: Sample) -> float:
    a = sample.exact_arguments()
    heads = a.num_key_value_heads or a.num_heads
    layout = layouts(a.layout)[0]

    def keys(x: Tensor) -> Tensor:
        if a.block_table is None:
            return to_heads(x, heads, layout)
        return pages_by_head(x, heads).transpose(0, 1).flatten(1, 2)

    query, key = to_heads(a.query, a.num_heads, layout), keys(a.key)
    if a.key_antiquant_scale is not None:
        scale = magnitude(a.key_antiquant_scale)
        of_tokens = max(scale.flatten().tolist(), default=0.0)
        key = key * (of_tokens if a.key_antiquant_mode else scale.reshape(heads, 1, -1))
    if a.query_rope is not None:
        query = torch.cat((query, to_heads(a.query_rope, a.num_heads, layout)), -1)
        key = torch.cat((key, keys(a.key_rope)), -1)
    sink = 0.0 if a.sink is None else float(magnitude(a.sink).max())
    return max(largest_score(query, key, a.scale_value), sink)
