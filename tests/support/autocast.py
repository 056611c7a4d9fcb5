"""Casts the arguments of a call by hand, as autocast does."""

from __future__ import annotations

import torch

from support.samples import Sample

# Softmax statistics are float32 always.
STATISTICS = ("softmax_max", "softmax_sum")


def kept_names(sample: Sample) -> set[str]:
    """The arguments that keep their dtype."""
    names = {
        *STATISTICS, "sink", "token_weight", "deq_scale1", "quant_scale1", "deq_scale2",
        "quant_scale2",
    }  # fmt: skip
    if sample.arguments.get("cmp_ratio", 1) > 1 or "attn_softmax_l1_norm" in sample.inputs:
        names.add("attn_softmax_l1_norm")
        weights = sample.inputs.get("weights")
        if weights is not None and weights.dtype == torch.float32:
            names.add("weights")
    slopes = sample.arguments.get("pse_type", 1) >= 2
    if sample.options.get("key_antiquant_mode") or "dequant_scale_query" in sample.options:
        names |= {"key_antiquant_scale", "value_antiquant_scale", "dequant_scale_query"}
    if sample.operator == "fused_infer_attention_score":
        # Its sink is float32 or has query's dtype.
        names -= {n for n in ("sink",) if n in sample.tensors and sample.tensors[n].itemsize == 2}
    return names | {"quant_offset2"} | ({"pse_shift"} if slopes else set())


def cast(sample: Sample, dtype: torch.dtype) -> Sample:
    """A tensor that is passed twice stays one tensor."""
    kept = {id(x) for name, x in sample.tensors.items() if name in kept_names(sample)}
    return sample.map(
        lambda x: (
            x.to(dtype)
            if x.is_floating_point() and x.dtype != torch.float64 and id(x) not in kept
            else x
        )
    )
