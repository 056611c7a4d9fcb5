"""Calls that sparse_lightning_indexer_grad_kl_loss must refuse."""

from __future__ import annotations

from . import sparse_errors as shared
from .sparse_lightning_indexer_grad_kl_loss import KL_LOSS

WRONG_CALLS = [
    *shared.tensor_rules(KL_LOSS),
    *shared.option_rules(KL_LOSS, modes=(3,)),
    *shared.length_rules(KL_LOSS),
    *shared.no_count_rules(KL_LOSS),
    *shared.index_rules(KL_LOSS),
    *shared.limit_rules(
        KL_LOSS, shared.DEVICE, "sparse_indices",
        Dr=("query_rope", {"rope": 32}),
        Nidx=("query_index", {"index_heads": 4}),
        Didx=("query_index", {"index_d": 64}),
        no_ropes=("(query|key)_rope", {"rope": 0}),
        more_queries=("query", {"s": (6, 5)}),
    ),
]  # fmt: skip
