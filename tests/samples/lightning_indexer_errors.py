"""Calls that lightning_indexer and its gradient must refuse."""

from __future__ import annotations

from . import sparse_errors as shared
from .lightning_indexer import LIGHTNING_INDEXER, LIGHTNING_INDEXER_GRAD, OPERATORS
from .sparse import SparseCase

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=128, k=1024)

WRONG_CALLS = [
    *(
        row
        for operator in OPERATORS
        for make in (shared.tensor_rules, shared.option_rules, shared.length_rules)
        for row in make(operator)
    ),
    *shared.count_rules(LIGHTNING_INDEXER),
    *shared.no_count_rules(LIGHTNING_INDEXER_GRAD),
    *shared.index_rules(LIGHTNING_INDEXER_GRAD),
    *shared.limit_rules(LIGHTNING_INDEXER, DEVICE, "sparse_count"),
    *shared.limit_rules(LIGHTNING_INDEXER_GRAD, DEVICE, "sparse_indices"),
]
