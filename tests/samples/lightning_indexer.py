"""Samples of lightning_indexer and its gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from ascend_attn_ops import reference

from .sample import Recipe, Sample
from .sparse import SparseCase, indices

_TND = SparseCase(layout="TND", lengths=((3, 0, 6, 0), (5, 2, 9, 0)))

CASES = [
    SparseCase(),
    SparseCase(b=1, s=(63, 77), heads=4, k=16),
    SparseCase(s=(33, 33), heads=3, d=24, k=7),
    SparseCase(s=(7, 19), heads=8, k=1),
    SparseCase(s=(1, 13), heads=64, d=32, k=8),
    SparseCase(b=3, s=(5, 9), heads=1, d=17, k=9),  # many scores are zero: ties
    SparseCase(s=(6, 6), heads=2, k=20, mode=0),
    SparseCase(s=(9, 40), k=12, mode=0),
    SparseCase(b=1, s=(3, 300), heads=8, d=16, k=130),
    SparseCase(s=(11, 5)),  # rows without keys
    SparseCase(s=(11, 5), mode=0),
    SparseCase(b=0),
    SparseCase(s=(0, 7)),
    SparseCase(s=(5, 0)),
    SparseCase(s=(5, 0), mode=0),
    SparseCase(b=4, s=(6, 9), lengths=((6, 3, 0, 4), (9, 5, 4, 0))),
    SparseCase(b=2, s=(6, 20), lengths=((5, 6), (17, 9)), mode=0, k=14),
    _TND,
    replace(_TND, tail=(2, 3), k=6),
    replace(_TND, mode=0, heads=8, k=12),
    replace(_TND, lengths=((7, 4, 4), (3, 4, 9)), heads=3),  # rows without keys
    replace(_TND, lengths=((0, 0), (0, 0)), tail=(3, 4)),
    replace(_TND, lengths=((), ())),
    SparseCase(s=(3, 5), heads=8, d=128, k=1024),
    replace(_TND, heads=16, d=128, k=2048),
]

# Selections that the operator itself does not make, but that its gradient takes.
GRAD_CASES = [
    SparseCase(s=(9, 9), pattern="padded", k=5),
    SparseCase(s=(9, 9), pattern="first", k=5),
    SparseCase(s=(9, 17), pattern="duplicates", k=8),
    SparseCase(s=(9, 9), pattern="unread", k=8),
]


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    random = case.random(dtype)
    inputs = {
        "query": random.normal(*case.tokens(0), case.heads, case.d),
        "key": random.normal(*case.tokens(1), 1, case.d),
        "weights": random.normal(*case.tokens(0), case.heads),
    }
    options = {
        **case.length_options(),
        "layout": case.layout,
        "sparse_count": case.k,
        "sparse_mode": case.mode,
        "return_values": True,
    }
    return Sample("lightning_indexer", f"{case.id}-{dtype}", inputs, options)


def build_grad(case: SparseCase, dtype: torch.dtype) -> Sample:
    forward, random = build(case, dtype), case.random(dtype)
    chosen = forward.call(reference)[0] if case in CASES else indices(case, random)
    inputs = {
        "query": forward.inputs["query"],
        "key": forward.inputs["key"],
        "d_values": random.normal(*chosen.shape),
        "sparse_indices": chosen,
        "weights": forward.inputs["weights"],
    }
    options = {
        name: x
        for name, x in forward.options.items()
        if name not in ("sparse_count", "return_values")
    }
    return Sample("lightning_indexer_grad", forward.id, inputs, options)


RECIPES = [
    *(
        Recipe("lightning_indexer", case, build, differentiable=not case.has_counts)
        for case in CASES
    ),
    *(
        Recipe("lightning_indexer_grad", case, build_grad)
        for case in CASES + GRAD_CASES
        if not case.has_counts  # rejected, see test_errors.py
    ),
]
