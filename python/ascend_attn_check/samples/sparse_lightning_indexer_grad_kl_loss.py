"""Samples of sparse_lightning_indexer_grad_kl_loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.call import Outputs, Sample, lengths
from torch import Tensor

from . import sparse_flash_attention
from .randomness import Random
from .record import Gradient, Operator
from .sparse import LENGTHS, SparseCase, on_device, sized
from .torch_npu_calls import torch_npu

_TND = SparseCase(layout="TND", lengths=((3, 0, 6, 0), (5, 2, 9, 0)), rope=8)

CASES = [
    SparseCase(rope=8),
    SparseCase(b=1, s=(63, 77), heads=8, k=16, rope=16, index_heads=8, index_d=32),
    SparseCase(s=(33, 33), heads=3, d=24, k=7, index_heads=1),
    SparseCase(s=(7, 19), heads=8, k=1, rope=8),  # p and y are one
    SparseCase(s=(1, 13), heads=64, d=32, k=8, index_heads=64),
    SparseCase(b=3, s=(5, 9), heads=1, d=17, k=9, rope=5, index_d=7),
    SparseCase(s=(6, 6), heads=2, k=20, rope=8),
    SparseCase(s=(11, 5), rope=8),  # rows without keys
    SparseCase(s=(9, 9), pattern="padded", k=5, rope=8),
    SparseCase(s=(9, 9), pattern="hole", k=5, rope=8),
    SparseCase(s=(9, 9), pattern="first", k=5),
    SparseCase(s=(9, 17), pattern="duplicates", k=8, rope=8),
    SparseCase(s=(9, 9), pattern="unread", k=8, rope=8),
    SparseCase(s=(5, 17), pattern="clamped", k=8, rope=8),
    SparseCase(s=(5, 17), pattern="partial", k=8, rope=8),
    SparseCase(b=4, s=(6, 9), lengths=((6, 3, 0, 4), (9, 5, 4, 4)), rope=8),
    SparseCase(b=2, s=(6, 9), lengths=((6, 6), (9, 9)), rope=8),
    SparseCase(b=2, s=(6, 9), lengths=((5, 6), (3, 0)), k=3),  # rows without keys
    SparseCase(b=3, s=(5, 9), lengths=((0, 0, 0), (3, 9, 0)), rope=8),
    SparseCase(s=(9, 9), pattern="padded", k=5, rope=8, selection_heads=False),
    SparseCase(s=(6, 9), lengths=((6, 3), (9, 5)), selection_heads=False),
    SparseCase(b=0, rope=8),
    SparseCase(s=(0, 7), rope=8),
    SparseCase(s=(5, 0), rope=8),
    SparseCase(d=0, rope=8),
    SparseCase(index_heads=0),
    SparseCase(index_d=0, rope=5),
    _TND,
    replace(_TND, tail=(2, 3), k=6, pattern="padded"),
    replace(_TND, heads=8, k=12, rope=0, index_heads=8),
    replace(_TND, lengths=((7, 4, 4), (3, 4, 9)), heads=3),  # rows without keys
    replace(_TND, lengths=((0, 0), (0, 0)), tail=(3, 4)),
    replace(_TND, lengths=((), ())),
    SparseCase(s=(3, 5), heads=32, d=512, rope=64, index_heads=8, index_d=128, k=1024),
    replace(_TND, heads=32, d=512, rope=64, index_heads=16, index_d=128, k=2048),
    SparseCase(s=(3, 5), heads=32, d=512, index_heads=8, index_d=128, k=2048),
]


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    """The target is attention over the selected keys, and sums to one, except in two patterns.

    `partial`: the statistics are those of attention to every key. `hole`: attention ends at the
    first -1 of a row, and the loss leaves it out. `clamped` is an indexer so sure of itself that
    some of its probabilities are below 1e-8.
    """
    attention = sparse_flash_attention.build(case, dtype)
    attended = attention.inputs["sparse_indices"]
    if case.pattern == "first":
        attended = attended.gather(-1, (attended == -1).sort(stable=True).indices)
    if case.pattern == "partial":
        attended = torch.arange(case.s[1], dtype=torch.int32).expand(*attended.shape[:-1], -1)
    _, softmax_max, softmax_sum = attention.replace(sparse_indices=attended).call(reference)
    random = Random(case.id, dtype)
    sharpness = 8 if case.pattern == "clamped" else 1
    inputs = {
        "query": attention.inputs["query"],
        "key": attention.inputs["key"],
        "query_index": sharpness * random.normal(*case.tokens(0), case.index_heads, case.index_d),
        "key_index": random.normal(*case.tokens(1), 1, case.index_d),
        "weights": random.normal(*case.tokens(0), case.index_heads)
        * max(case.index_heads * case.index_d, 1) ** -0.5,
        "sparse_indices": attention.inputs["sparse_indices"],
        "softmax_max": softmax_max,
        "softmax_sum": softmax_sum,
    }
    options = {
        "scale_value": attention.options["scale_value"],
        "query_rope": attention.options["query_rope"],
        "key_rope": attention.options["key_rope"],
        **{
            name: None if values is None else lengths(values)
            for name, values in zip(LENGTHS, map(case.length_list, (0, 1)), strict=True)
        },
        "layout": case.layout,
        "sparse_mode": case.mode,
    }
    return Sample(KL_LOSS.name, f"{case.id}-{dtype}", inputs, options)


def minus_two(sample: Sample, outputs: Outputs, loss: Tensor) -> Tensor:
    """A power of two: to scale by it is exact."""
    return torch.full_like(loss, -2)


def scaled(sample: Sample, outputs: Outputs, d_loss: Tensor) -> Outputs:
    """The operator returns the gradients of its loss."""
    return tuple((d_loss * gradient).to(gradient.dtype) for gradient in outputs[:3])


KL_LOSS = Operator(
    "sparse_lightning_indexer_grad_kl_loss",
    CASES,
    build,
    Gradient(
        ("query_index", "key_index", "weights"),
        ("loss",),
        backward=scaled,
        incoming=minus_two,
        stated=scaled,
    ),
    on_device=on_device,
    sized=sized(heads=32, d=512, rope=64, index_heads=8, index_d=128, k=1024),
    torch_npu=partial(torch_npu, "npu_sparse_lightning_indexer_grad_kl_loss"),
)

OPERATORS = [KL_LOSS]
