"""Calls that lightning_indexer and its gradient must refuse."""

from __future__ import annotations

from .lightning_indexer import LIGHTNING_INDEXER, LIGHTNING_INDEXER_GRAD, OPERATORS
from .sparse import SparseCase
from .sparse_errors import (
    count_rules,
    index_rules,
    length_rules,
    limit_rules,
    no_count_rules,
    option_rules,
    tensor_rules,
)

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=128, k=1024)

WRONG_CALLS = [
    *(
        row
        for operator in OPERATORS
        for make in (tensor_rules, option_rules, length_rules)
        for row in make(operator)
    ),
    *count_rules(LIGHTNING_INDEXER),
    *no_count_rules(LIGHTNING_INDEXER_GRAD),
    *index_rules(LIGHTNING_INDEXER_GRAD),
    *limit_rules(LIGHTNING_INDEXER, DEVICE, "sparse_count"),
    *limit_rules(LIGHTNING_INDEXER_GRAD, DEVICE, "sparse_indices"),
]
