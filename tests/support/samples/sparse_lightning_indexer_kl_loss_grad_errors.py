"""Calls that sparse_lightning_indexer_kl_loss_grad must refuse."""

from __future__ import annotations

from dataclasses import replace

from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.check.samples.sparse_lightning_indexer_kl_loss_grad import KL_LOSS_GRAD
from torch import Tensor

from . import sparse_errors as shared
from .wrong_call import WrongCall, put

# Within the device's limits.
DEVICE = SparseCase(s=(9, 2), index_heads=8, index_d=128, k=512, ratio=4)


def limit(rule: str, case: SparseCase, argument: str, change: object = None) -> WrongCall:
    return WrongCall(f"limits-{rule}", KL_LOSS_GRAD, case, change, argument, limits="A2")


WRONG_CALLS = [
    *shared.tensor_rules(KL_LOSS_GRAD),
    *shared.option_rules(KL_LOSS_GRAD),
    *shared.length_rules(KL_LOSS_GRAD),
    *shared.index_rules(KL_LOSS_GRAD),
    *shared.compression_rules(KL_LOSS_GRAD),
    limit("Nidx", replace(DEVICE, index_heads=4), "query_index"),
    limit("Didx", replace(DEVICE, index_d=64), "query_index"),
    limit("K", replace(DEVICE, k=2048), "sparse_indices"),
    limit("ratio", replace(DEVICE, s=(9, 3), ratio=3), "cmp_ratio"),
    limit("B 0", replace(DEVICE, b=0), "query_index"),
    limit("B 257", replace(DEVICE, b=257), "query_index"),
    limit("S1 0", replace(DEVICE, s=(0, 0)), "query_index"),
    limit("S1 8193", replace(DEVICE, b=1, s=(8193, 2048), k=512), "query_index"),
    limit("S2 0", replace(DEVICE, s=(3, 0), ratio=1), "query_index"),
    limit("deterministic", DEVICE, "deterministic", {"deterministic": True}),
    WrongCall(
        "limits-weights", KL_LOSS_GRAD, DEVICE, put("weights", Tensor.bfloat16), "weights",
        TypeError, limits="A2",
    ),
    WrongCall(
        "limits-950", KL_LOSS_GRAD, DEVICE, None, r"\w+", NotImplementedError, limits="950"
    ),
]  # fmt: skip
