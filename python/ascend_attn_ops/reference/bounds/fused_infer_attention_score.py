"""Bounds on the results of fused_infer_attention_score."""

from __future__ import annotations

from dataclasses import replace

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
from ascend_attn_ops.reference.operators.flash_attention_score import from_heads, to_heads
from ascend_attn_ops.reference.operators.fused_infer_attention_score import (
    by_sequence,
    layouts,
    pages_by_head,
    scaled_queries,
    size_of_value,
)


def dtype_of(sample: Sample) -> torch.dtype:
    is_int8 = sample.inputs["query"].dtype == torch.int8
    dtype: torch.dtype = (sample.options["query_rope"] if is_int8 else sample.inputs["query"]).dtype
    return dtype


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), dtype_of(sample)
    out, lse = exact.call(reference)
    # Also of int8, whose least number has no absolute value there.
    sizes = {"value": magnitude(exact.inputs["value"].double())}
    if exact.options.get("value_antiquant_scale") is not None:
        sizes["value_antiquant_scale"] = magnitude(exact.options["value_antiquant_scale"])
    terms, _ = exact.replace(**sizes).call(reference)
    largest = largest_score_of(sample)
    of_out = within("out", out, terms, dtype, largest)
    if sample.options.get("dequant_scale_query") is not None:
        of_out = replace(of_out, allowed=of_out.allowed + steps_of_weights(exact))
    return [of_out, of_lse(lse, dtype, largest)]


def steps_of_weights(exact: Sample) -> Tensor:
    """Half a step of each weight: of 512 keys the device rounds them to 1/127 of their largest."""
    a = exact.exact_arguments()
    for name, x in vars(a).items():
        if name.startswith("actual_seq_lengths") and x is not None:
            setattr(a, name, x.tolist())
    inputs, output = layouts(a.layout)
    q = scaled_queries(a, inputs)
    steps = q.new_zeros(*q.shape[:3], size_of_value(a, a.num_key_value_heads or a.num_heads))
    for at, weights, v, _ in by_sequence(a, inputs, q):
        for p, x in zip(weights.split(512, -1), magnitude(v).split(512, 1), strict=True):
            if p.numel():
                steps[at] += p.amax(-1, keepdim=True) / 253 * x.sum(1, keepdim=True)
    return from_heads(steps, output)


def largest_score_of(sample: Sample) -> float:
    a = sample.exact_arguments()
    heads = a.num_key_value_heads or a.num_heads
    layout = layouts(a.layout)[0]

    def keys(x: Tensor) -> Tensor:
        if a.block_table is None:
            return to_heads(x, heads, layout)
        return pages_by_head(x, heads).transpose(0, 1).flatten(1, 2)

    key = keys(a.key)
    if a.key_antiquant_scale is not None and a.dequant_scale_query is None:
        scale = magnitude(a.key_antiquant_scale)
        of_tokens = max(scale.flatten().tolist(), default=0.0)
        key = key * (of_tokens if a.key_antiquant_mode else scale.reshape(heads, 1, -1))
    if a.query_rope is not None:
        key = torch.cat((key, keys(a.key_rope)), -1)
    sink = 0.0 if a.sink is None else float(magnitude(a.sink).max())
    return max(largest_score(scaled_queries(a, layout), key, a.scale_value), sink)
