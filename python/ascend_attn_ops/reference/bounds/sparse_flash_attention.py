"""Bounds on the results of sparse_flash_attention and its gradient."""

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
from ascend_attn_ops.reference.operators.sparse_flash_attention import join_rope
from ascend_attn_ops.reference.sequences import with_dense_keys


def score_size(a: Arguments) -> float:
    query, key = join_rope(a.query, a.query_rope), join_rope(a.key, a.key_rope)
    return largest_score(query, key, a.scale_value)


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    value = exact.inputs["value"]
    both, softmax_max, softmax_sum = exact.replace(
        value=torch.cat((value, magnitude(value)), -1)
    ).call(reference)
    out, terms = both.chunk(2, -1)
    largest = score_size(with_dense_keys(sample.exact_arguments(), "key", "key_rope"))
    return [
        within("out", out, terms, dtype, largest),
        *of_statistics(softmax_max, softmax_sum, dtype, largest),
    ]


def expected_gradient(sample: Sample) -> list[Expected]:
    names = ("d_query", "d_key", "d_value", "d_query_rope", "d_key_rope")
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    largest = score_size(sample.exact_arguments())
    return [
        within(name, x, terms, dtype, largest)
        for name, x, terms in zip(names, exact.call(reference), gradient_terms(exact), strict=True)
    ]


def gradient_terms(exact: Sample) -> Outputs:
    """Returns the bound A of the five gradients, by the reference.

    Every query is extended by zeros and its absolute value, and every key by its absolute value and
    zeros. That keeps the scores, and the extensions' gradients are those of absolute values.
    """
    changes: dict[str, Any] = {
        "value": magnitude(exact.inputs["value"]),
        "d_out": magnitude(exact.inputs["d_out"]),
        "out": -magnitude(exact.inputs["out"]),
        "softmax_sum": exact.inputs["softmax_sum"].abs(),  # a call may have any statistics
    }
    for name, x in exact.tensors.items():
        zeros = torch.zeros_like(x)
        if name in ("query", "query_rope"):
            changes[name] = torch.cat((x, zeros, magnitude(x)), -1)
        elif name in ("key", "key_rope"):
            changes[name] = torch.cat((x, magnitude(x), zeros), -1)
    d_query, d_key, d_value, d_query_rope, d_key_rope = exact.replace(**changes).call(reference)

    def part(x: Tensor, number: int) -> Tensor:
        return x.abs().chunk(3, -1)[number] if x.dim() > 1 else x

    return part(d_query, 1), part(d_key, 2), d_value, part(d_query_rope, 1), part(d_key_rope, 2)
