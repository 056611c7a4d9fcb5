"""Calls that sparse_lightning_indexer_grad_kl_loss must refuse."""

from __future__ import annotations

from dataclasses import replace

from ascend_attn_ops.check.samples.sample import Sample
from ascend_attn_ops.check.samples.sparse_lightning_indexer_grad_kl_loss import KL_LOSS

from . import sparse_errors as shared
from .wrong_call import WrongCall, statistics_rules


def without_heads(sample: Sample) -> Sample:
    by_head = {"query": -2, "query_rope": -2, "softmax_max": -1, "softmax_sum": -1}
    given = sample.tensors
    return sample.given(**{name: given[name].narrow(at, 0, 0) for name, at in by_head.items()})


WRONG_CALLS = [
    WrongCall("no heads", KL_LOSS, shared.BSND, without_heads, "query", expected="one head"),
    *shared.tensor_rules(KL_LOSS),
    *shared.option_rules(KL_LOSS, modes=(3,)),
    *shared.length_rules(KL_LOSS),
    *shared.index_rules(KL_LOSS),
    *statistics_rules(KL_LOSS, shared.BSND),
    *shared.limit_rules(
        KL_LOSS, replace(shared.DEVICE, heads=32),
        K_too_large=("sparse_indices", {"k": 9216}),
        K_between=("sparse_indices", {"k": 2049}),
        K_with_a_tail=("sparse_indices", {"k": 2176}),
        N1=("query", {"heads": 16}),
        Dr=("query_rope", {"rope": 32}),
        Nidx=("query_index", {"index_heads": 4}),
        Didx=("query_index", {"index_d": 64}),
        more_queries=("query", {"s": (6, 5)}),
    ),
]  # fmt: skip
