"""Samples of sparse_lightning_indexer_kl_loss_grad."""

from __future__ import annotations

from dataclasses import replace

import torch
from ascend_attn_ops.reference.call import Sample

from .randomness import Random
from .record import Operator
from .sparse import COMPRESSED, SparseCase, indices, sized

_TND = SparseCase(layout="TND", lengths=((3, 0, 6, 0), (5, 2, 9, 0)))

CASES = [
    SparseCase(),
    *COMPRESSED,
    SparseCase(b=1, s=(63, 77), k=16, index_heads=8, index_d=32),
    SparseCase(s=(7, 19), k=1),  # y is one
    SparseCase(b=1, s=(9, 300), k=140, mode=0),
    SparseCase(s=(11, 5)),  # rows without keys
    SparseCase(s=(37, 9), pattern="padded", k=5, ratio=4),
    SparseCase(s=(37, 9), pattern="hole", k=5, ratio=4),
    SparseCase(s=(9, 9), pattern="first", k=5),
    SparseCase(s=(37, 9), pattern="duplicates", k=8, ratio=4),
    SparseCase(s=(37, 9), pattern="future", k=8, ratio=4),
    SparseCase(s=(9, 9), pattern="unread", k=8),
    SparseCase(s=(9, 9), pattern="clamped", k=5),
    SparseCase(s=(9, 9), k=5, selection_heads=False),
    SparseCase(b=4, s=(6, 9), lengths=((6, 3, 0, 4), (9, 5, 4, 4))),
    SparseCase(b=3, s=(5, 9), lengths=((0, 0, 0), (3, 9, 0))),
    SparseCase(b=0),
    SparseCase(s=(0, 7)),
    SparseCase(s=(5, 0)),
    SparseCase(k=5, index_heads=0),
    SparseCase(k=6, index_d=0),
    _TND,
    replace(_TND, tail=(2, 3), k=6, pattern="padded"),
    replace(_TND, lengths=((0, 0), (0, 0)), tail=(3, 4)),
    replace(_TND, lengths=((), ())),
    SparseCase(s=(11, 2), index_heads=8, index_d=128, k=512, ratio=4),
    SparseCase(
        layout="TND", lengths=((13, 3, 8), (3, 0, 2)), index_heads=8, index_d=128, k=512, ratio=4
    ),
    SparseCase(s=(9, 9), index_heads=16, index_d=128, k=1024),
]


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    """The target of a row is part of a distribution: it adds up to less than one.

    `clamped` is an indexer so sure of itself that some of its probabilities are almost 0.
    """
    random = Random(case.id, dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sharpness = 8 if case.pattern == "clamped" else 1
    selected = indices(case, random)
    weights = random.normal(*case.tokens(0), case.index_heads).to(exact)
    target = torch.rand(selected.shape, generator=random.generator, dtype=torch.float64)
    inputs = {
        "query_index": sharpness * random.normal(*case.tokens(0), case.index_heads, case.index_d),
        "key_index": random.normal(*case.tokens(1), 1, case.index_d),
        "weights": weights * max(case.index_heads * case.index_d, 1) ** -0.5,
        "sparse_indices": selected,
        "attn_softmax_l1_norm": (target / case.k).masked_fill(selected < 0, 0).to(exact),
    }
    options = {
        **case.length_options(),
        "layout": case.layout,
        "sparse_mode": case.mode,
        **case.compression_options(),
    }
    return Sample(KL_LOSS_GRAD.name, f"{case.id}-{dtype}", inputs, options)


def on_device(case: SparseCase) -> bool:
    return case.k >= 512


KL_LOSS_GRAD = Operator(
    "sparse_lightning_indexer_kl_loss_grad",
    CASES,
    build,
    on_device=on_device,
    sized=sized(index_heads=8, index_d=128, k=512),
)

OPERATORS = [KL_LOSS_GRAD]
