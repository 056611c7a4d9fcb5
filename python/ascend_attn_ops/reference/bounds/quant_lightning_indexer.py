"""The bound on the scores by which quant_lightning_indexer selects."""

from __future__ import annotations

import torch

from ascend_attn_ops.reference.bounds.expected import VANISHING
from ascend_attn_ops.reference.bounds.lightning_indexer import assert_best
from ascend_attn_ops.reference.call import Outputs, Sample
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.operators.quant_lightning_indexer import key_scores


def assert_same_selection(sample: Sample, outputs: Outputs) -> None:
    """Sets of keys are compared. Devices round the products of int8 numbers, and those of weights
    and scales, to float16, which may be subnormal; sums are those of float32."""
    call = sample.exact_arguments()
    scores = key_scores(call)
    magnitudes = sample.map(lambda x: x.abs() if x.is_floating_point() else x).exact_arguments()
    terms = key_scores(magnitudes)
    half = sample.inputs["weights"].dtype == torch.float16
    sums = (call.query.shape[-2] + 3) * 2.0**-24
    # In float32, the products of weights and scales are rounded as well.
    relative = sums + (2.0**-10 + 2.0**-22 if half else 2.0**-24)
    allowed = relative * terms.clamp(min=0) + VANISHING
    if half:
        ones = {name: torch.ones_like(call.weights) for name in ("weights", "query_dequant_scale")}
        unweighted = key_scores(Arguments(**{**vars(magnitudes), **ones}))
        allowed = allowed + 2.0**-25 * unweighted.clamp(min=0)
    (indices,) = outputs
    assert_best(indices.flatten(0, -2), scores, allowed)
