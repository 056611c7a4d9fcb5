"""Calls that lightning_indexer and its gradient must refuse."""

from __future__ import annotations

from dataclasses import replace

from ascend_attn_ops.check.samples.lightning_indexer import (
    LIGHTNING_INDEXER,
    LIGHTNING_INDEXER_GRAD,
    OPERATORS,
)
from ascend_attn_ops.check.samples.sparse import SparseCase
from torch import Tensor

from . import sparse_errors as shared
from .wrong_call import WrongCall, put

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=128, k=1024)
COMPRESSED = SparseCase(s=(9, 2), heads=8, d=128, k=512, ratio=4)
HEADS = ("query", {"heads": 65})

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
    WrongCall(
        "pages-values", LIGHTNING_INDEXER, shared.PAGES[0], {"return_values": True},
        "return_values",
    ),
    *shared.limit_rules(
        LIGHTNING_INDEXER, DEVICE,
        N=HEADS, K_too_large=("sparse_count", {"k": 9217}), K_between=("sparse_count", {"k": 2049}),
    ),
    *shared.token_rules(LIGHTNING_INDEXER, DEVICE),
    *(
        WrongCall(
            f"limits-compressed {rule}", LIGHTNING_INDEXER, replace(COMPRESSED, **sizes), None,
            argument, limits="A2",
        )
        for rule, argument, sizes in (
            ("ratio", "cmp_ratio", {"s": (9, 3), "ratio": 3}),
            ("heads", "query", {"heads": 7}),
            ("K", "sparse_count", {"k": 9216}),
        )
    ),
    WrongCall(
        "limits-compressed weights", LIGHTNING_INDEXER, COMPRESSED,
        put("weights", Tensor.bfloat16), "weights", TypeError, limits="A2",
    ),
    WrongCall(
        "limits-compressed 950", LIGHTNING_INDEXER, COMPRESSED, None, "cmp_ratio", limits="950"
    ),
    *shared.limit_rules(
        LIGHTNING_INDEXER_GRAD, DEVICE,
        N=HEADS,
        K_too_large=("sparse_indices", {"k": 2049}),
        fewer_keys_than_slots=("sparse_indices", {"mode": 0}),
    ),
    WrongCall(
        "limits-weights in float32", LIGHTNING_INDEXER_GRAD, DEVICE, put("weights", Tensor.float),
        "weights", TypeError, limits="A2",
    ),
]  # fmt: skip
