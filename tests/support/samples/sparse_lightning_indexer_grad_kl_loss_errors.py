"""Calls that sparse_lightning_indexer_grad_kl_loss must refuse."""

from __future__ import annotations

from dataclasses import replace

import torch
from ascend_attn_check.samples.sparse_lightning_indexer_grad_kl_loss import KL_LOSS
from ascend_attn_ops.reference.call import Sample

from . import sparse_errors as shared
from .wrong_call import statistics_rules, wrong_call


def without_heads(sample: Sample) -> Sample:
    by_head = {"query": -2, "query_rope": -2, "softmax_max": -1, "softmax_sum": -1}
    given = sample.tensors
    return sample.given(**{name: given[name].narrow(at, 0, 0) for name, at in by_head.items()})


WRONG_CALLS = [
    wrong_call(KL_LOSS, shared.BSND, "query: one head", change=without_heads),
    *shared.tensor_rules(KL_LOSS),
    *shared.option_rules(KL_LOSS, modes=(3,)),
    *shared.length_rules(KL_LOSS),
    *shared.index_rules(KL_LOSS),
    *statistics_rules(KL_LOSS, shared.BSND),
    wrong_call(KL_LOSS, shared.BSND, r"shape \(B, S1\)", token_weight=torch.ones(2, 7)),
    wrong_call(KL_LOSS, shared.BSND, id="three axes", token_weight=torch.ones(2, 5, 1)),
    wrong_call(KL_LOSS, shared.BSND, "dtype bool or a floating point dtype, got int64", TypeError,
               token_weight=torch.ones(2, 5).long()),
    *shared.limit_rules(
        KL_LOSS, replace(shared.DEVICE, heads=32),
        ("sparse_indices", {"k": 9216}), ("sparse_indices", {"k": 2049}),
        ("sparse_indices", {"k": 2176}),  # with a tail
        ("query", {"heads": 16}), ("query_rope", {"rope": 32}), ("query_index", {"index_heads": 4}),
        ("query_index", {"index_d": 64}), ("query", {"s": (6, 5)}),
    ),
]  # fmt: skip
