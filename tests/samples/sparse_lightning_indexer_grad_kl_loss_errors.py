"""Calls that sparse_lightning_indexer_grad_kl_loss must refuse."""

from __future__ import annotations

from .sparse_errors import (
    DEVICE,
    index_rules,
    length_rules,
    limit_rules,
    no_count_rules,
    option_rules,
    tensor_rules,
)
from .sparse_lightning_indexer_grad_kl_loss import KL_LOSS

WRONG_CALLS = [
    *tensor_rules(KL_LOSS),
    *option_rules(KL_LOSS, modes=(3,)),
    *length_rules(KL_LOSS),
    *no_count_rules(KL_LOSS),
    *index_rules(KL_LOSS),
    *limit_rules(
        KL_LOSS, DEVICE, "sparse_indices",
        Dr=("query_rope", {"rope": 32}),
        Nidx=("query_index", {"index_heads": 4}),
        Didx=("query_index", {"index_d": 64}),
        no_ropes=("(query|key)_rope", {"rope": 0}),
        more_queries=("query", {"s": (6, 5)}),
    ),
]  # fmt: skip
