"""Bounds on the results of attention_update."""

from __future__ import annotations

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import OF_TERMS, Expected, wide, within
from ascend_attn_ops.reference.call import Sample


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["local_out"][0].dtype
    out, lse_out = exact.call(reference)
    parts = [x.abs() for x in exact.inputs["local_out"]]
    terms, _ = exact.replace(local_out=parts).call(reference)
    # A sum of logarithms: what it is the logarithm of is accurate to 1e-5, and so is the maximum.
    of_lse = OF_TERMS[wide(dtype)]
    return [
        within("out", out, terms, dtype),
        Expected("lse_out", lse_out, of_lse * lse_out.abs().clamp(min=1)),
    ]
