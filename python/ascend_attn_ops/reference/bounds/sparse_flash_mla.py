"""Bounds on the results of sparse_flash_mla and its gradient."""

from __future__ import annotations

from typing import Any

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
from ascend_attn_ops.reference.call import Outputs, Sample


def score_size(sample: Sample) -> float:
    keys = (sample.inputs[name] for name in ("ori_kv", "cmp_kv"))
    scale, sink = sample.options["scale_value"], sample.options["sink"]
    sizes = [largest_score(sample.inputs["query"], x, scale) for x in keys if x is not None]
    return max(*sizes, 0.0 if sink is None else float(magnitude(sink).max()))


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    query, ori, cmp = (exact.inputs[x] for x in ("query", "ori_kv", "cmp_kv"))
    both, lse = exact.replace(
        query=torch.cat((query, torch.zeros_like(query)), -1),
        ori_kv=torch.cat((ori, magnitude(ori)), -1),
        cmp_kv=None if cmp is None else torch.cat((cmp, magnitude(cmp)), -1),
    ).call(reference)
    out, terms = both.chunk(2, -1)
    largest = score_size(exact)
    return [within("out", out, terms, dtype, largest), of_lse(lse, dtype, largest)]


def expected_gradient(sample: Sample) -> list[Expected]:
    names = ("d_query", "d_ori_kv", "d_cmp_kv", "d_sink", "cmp_softmax_l1_norm")
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    largest = score_size(exact)
    return [
        within(name, x, terms, dtype, largest)
        for name, x, terms in zip(names, exact.call(reference), gradient_terms(exact), strict=True)
    ]


def gradient_terms(exact: Sample) -> Outputs:
    """Returns the bound A of the gradients, by the reference.

    Scores are those of the first third of query and keys. The second third of the keys, their
    absolute values, meets the absolute values of d_out, and the last third of the query collects
    its own.
    """

    def thirds(x: Tensor, *parts: Tensor | None) -> Tensor:
        return torch.cat([torch.zeros_like(x) if y is None else y for y in parts], -1)

    changes: dict[str, Any] = {}
    for name, x in exact.inputs.items():
        if name == "query":
            changes[name] = thirds(x, x, None, magnitude(x))
        elif name in ("ori_kv", "cmp_kv") and x is not None:
            changes[name] = thirds(x, x, magnitude(x), None)
        elif name == "d_out":
            changes[name] = thirds(x, None, magnitude(x), None)
        elif name == "out":
            changes[name] = thirds(x, None, -magnitude(x), None)
    d_query, d_ori, d_cmp, d_sink, mass = exact.replace(**changes).call(reference)

    def of_keys(x: Tensor) -> Tensor:
        if x.dim() == 1:
            return x
        _, of_values, of_scores = x.abs().chunk(3, -1)
        return of_values + of_scores

    return d_query.abs().chunk(3, -1)[1], of_keys(d_ori), of_keys(d_cmp), d_sink.abs(), mass
