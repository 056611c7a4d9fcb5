"""Calls that lightning_indexer and its gradient must refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ascend_attn_check.samples.lightning_indexer import (
    LIGHTNING_INDEXER,
    LIGHTNING_INDEXER_GRAD,
    OPERATORS,
)
from ascend_attn_check.samples.sparse import SparseCase
from torch import Tensor

from . import sparse_errors as shared
from .wrong_call import wrong_call

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=128, k=1024)
COMPRESSED = SparseCase(s=(9, 2), heads=8, d=128, k=512, ratio=4)
HEADS = ("query", {"heads": 65})

wrong = partial(wrong_call, LIGHTNING_INDEXER)

WRONG_CALLS = [
    *(
        row
        for operator in OPERATORS
        for make in (shared.tensor_rules, shared.option_rules, shared.length_rules)
        for row in make(operator)
    ),
    *shared.index_rules(LIGHTNING_INDEXER_GRAD),
    *shared.compression_rules(LIGHTNING_INDEXER),
    *shared.page_rules(LIGHTNING_INDEXER),
    *shared.page_limit_rules(LIGHTNING_INDEXER, DEVICE),
    wrong(shared.PAGES[0], return_values=True),
    *shared.limit_rules(
        LIGHTNING_INDEXER, DEVICE, HEADS, ("sparse_count", {"k": 9217}),
        ("sparse_count", {"k": 2049}),
    ),
    *shared.token_rules(LIGHTNING_INDEXER, DEVICE),
    wrong(replace(COMPRESSED, heads=7), "query: ", limits="A2"),
    wrong(replace(COMPRESSED, k=9216), "sparse_count: ", limits="A2"),
    wrong(COMPRESSED, "", TypeError, weights=Tensor.bfloat16, limits="A2"),
    wrong(COMPRESSED, "cmp_ratio: ", limits="950"),
    *shared.limit_rules(
        LIGHTNING_INDEXER_GRAD, DEVICE, HEADS, ("sparse_indices", {"k": 2049}),
        ("sparse_indices", {"mode": 0}),  # fewer keys than slots
    ),
    wrong_call(
        LIGHTNING_INDEXER_GRAD, DEVICE, "", TypeError, weights=Tensor.float, limits="A2"
    ),
]  # fmt: skip
