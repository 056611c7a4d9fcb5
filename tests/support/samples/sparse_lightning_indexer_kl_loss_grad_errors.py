"""Calls that sparse_lightning_indexer_kl_loss_grad must refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_lightning_indexer_kl_loss_grad import KL_LOSS_GRAD
from torch import Tensor

from . import sparse_errors as shared
from .wrong_call import wrong_call

# Within the device's limits.
DEVICE = SparseCase(s=(9, 2), index_heads=8, index_d=128, k=512, ratio=4)


LIMITS = {
    "query_index": (
        {"index_heads": 4}, {"index_d": 64}, {"b": 0}, {"b": 257}, {"s": (0, 0)},
        {"b": 1, "s": (8193, 2048), "k": 512}, {"s": (3, 0), "ratio": 1},
    ),
    "sparse_indices": ({"k": 2048},),
    "cmp_ratio": ({"s": (9, 3), "ratio": 3},),
}  # fmt: skip

wrong = partial(wrong_call, KL_LOSS_GRAD)

WRONG_CALLS = [
    *shared.tensor_rules(KL_LOSS_GRAD),
    *shared.option_rules(KL_LOSS_GRAD),
    *shared.length_rules(KL_LOSS_GRAD),
    *shared.index_rules(KL_LOSS_GRAD),
    *shared.compression_rules(KL_LOSS_GRAD),
    *(
        wrong(replace(DEVICE, **sizes), f"{name}: ", id=sizes, limits="A2")
        for name, changes in LIMITS.items()
        for sizes in changes
    ),
    wrong(DEVICE, deterministic=True, limits="A2"),
    wrong(DEVICE, "", TypeError, weights=Tensor.bfloat16, limits="A2"),
    wrong(DEVICE, r"\w+: ", NotImplementedError, limits="950"),
]
