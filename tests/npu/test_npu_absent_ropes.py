"""Sparse attention without ropes: CANN's functions require ropes, and the launch passes zeros."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from arrivals import arriving
from ascend_attn_ops.check.samples.sparse import SparseCase
from support.samples import OPERATORS

pytestmark = pytest.mark.usefixtures("no_limits")

FORWARD, LOSS = "sparse_flash_attention", "sparse_lightning_indexer_grad_kl_loss"
BSND = SparseCase(s=(9, 30), k=9, absorbed=True)
TND = SparseCase(layout="TND", lengths=((5, 0, 12), (21, 3, 17)), tail=(1, 4), absorbed=True)
PAGED = SparseCase(s=(9, 60), lengths=((9, 7), (60, 33)), k=4, page=16, absorbed=True)


@pytest.mark.parametrize(
    ("operator", "case"),
    [(FORWARD, BSND), (FORWARD, TND), (FORWARD, PAGED), (LOSS, BSND), (LOSS, TND)],
    ids=lambda x: x if isinstance(x, str) else x.id,
)
def test_zeros_arrive(operator: str, case: SparseCase) -> None:
    sample = OPERATORS[operator].make(replace(case, heads=4), torch.bfloat16)
    for name, beside in (("query_rope", "query"), ("key_rope", "key")):
        rope = arriving(sample, operator, name)
        if not case.page:  # the simulation hands keys over without their pages
            assert rope.shape == (*sample.inputs[beside].shape[:-1], 64)
        assert rope.is_contiguous()
        assert torch.equal(rope, torch.zeros_like(rope))
