"""Bounds on the results of flash_attention_score and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
    largest_score,
    magnitude,
    of_statistics,
    within,
)
from ascend_attn_ops.reference.call import Outputs, Sample
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.operators.flash_attention_score import by_head, from_heads, to_heads

GRADIENTS = ("dq", "dk", "dv", "dsink", "dq_rope", "dk_rope", "dpse")


def score_size(a: Arguments) -> float:
    """Returns the size of a score: of query and key, and of the bias added to their products."""
    query, key, _ = by_head(a, torch.float64)
    scale, bias = a.scale_value, 0.0
    if a.pse_shift is not None and a.pse_shift.numel():
        bias = float(magnitude(a.pse_shift).max())
        if a.pse_type >= 2:
            starts = [x[0] for x in (a.q_start_idx, a.kv_start_idx) if x]
            bias *= max(query.shape[2], key.shape[2]) + sum(map(abs, starts))
        if a.pse_type == 1:
            bias *= abs(scale)
    return largest_score(query, key, scale) + bias


def head_counts(a: Arguments) -> tuple[int, int]:
    query, key, _ = by_head(a, torch.float64)
    return query.shape[1], key.shape[1]


def beside(layout: str, heads: int, *parts: Tensor) -> Tensor:
    """Tensors of one layout as one with wider heads."""
    return from_heads(torch.cat([to_heads(x, heads, layout) for x in parts], -1), layout)


def part(x: Tensor, layout: str, heads: int, number: int, parts: int) -> Tensor:
    """One of what stands beside each other."""
    return from_heads(to_heads(x, heads, layout).chunk(parts, -1)[number], layout)


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    a = sample.exact_arguments()
    heads, key_heads = head_counts(a)
    value = exact.inputs["value"]
    both, softmax_max, softmax_sum = exact.replace(
        value=beside(a.layout, key_heads, value, magnitude(value))
    ).call(reference)
    out, terms = (part(both, a.layout, heads, number, 2) for number in range(2))
    largest = score_size(a)
    return [
        within("out", out, terms, dtype, largest),
        *of_statistics(softmax_max, softmax_sum, dtype, largest),
    ]


def expected_gradient(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    largest = score_size(sample.exact_arguments())
    # The gradient operator proper has three.
    return [
        within(name, x, terms, dtype, largest)
        for name, x, terms in zip(
            GRADIENTS, exact.call(reference), gradient_terms(exact), strict=False
        )
    ]


def gradient_terms(exact: Sample) -> Outputs:
    """A of the gradients, by the reference: beside every query stand zeros and its absolute value,
    beside every key its absolute value and zeros, and so in their ropes. The scores are the same,
    and what the gradients' parts beside are is what the absolute values would have."""
    a = exact.exact_arguments()
    heads, key_heads = head_counts(a)
    wider: dict[str, Any] = {
        "value": magnitude(exact.inputs["value"]),
        "dy": magnitude(exact.inputs["dy"]),
        "attention_in": -magnitude(exact.inputs["attention_in"]),
        "softmax_sum": exact.inputs["softmax_sum"].abs(),  # a call may have any statistics
    }
    for name, x in exact.tensors.items():
        if name in ("query", "query_rope"):
            wider[name] = beside(a.layout, heads, x, torch.zeros_like(x), magnitude(x))
        elif name in ("key", "key_rope"):
            wider[name] = beside(a.layout, key_heads, x, magnitude(x), torch.zeros_like(x))

    def of_query(x: Tensor) -> Tensor:
        return part(x, a.layout, heads, 1, 3).abs() if x.dim() > 1 else x

    def of_key(x: Tensor) -> Tensor:
        return part(x, a.layout, key_heads, 2, 3).abs() if x.dim() > 1 else x

    dq, dk, dv, *extended = exact.replace(**wider).call(reference)
    if not extended:
        return of_query(dq), of_key(dk), dv
    dsink, dq_rope, dk_rope, dpse = extended
    return of_query(dq), of_key(dk), dv, dsink, of_query(dq_rope), of_key(dk_rope), dpse
