"""Samples of lightning_indexer and its gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
)
from ascend_attn_ops.reference.bounds.lightning_indexer import expected_gradient
from ascend_attn_ops.reference.call import Outputs, Sample
from torch import Tensor

from .randomness import Random
from .record import Gradient, Operator
from .sparse import COMPRESSED, Pages, SparseCase, indices, on_device, sized
from .torch_npu_calls import torch_npu

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
    SparseCase(heads=0),
    SparseCase(d=0),
    SparseCase(b=4, s=(6, 9), lengths=((6, 3, 0, 4), (9, 5, 4, 0))),
    SparseCase(b=2, s=(6, 20), lengths=((5, 6), (17, 9)), mode=0, k=14),
    SparseCase(b=2, s=(6, 9), lengths=((6, 6), (9, 9))),
    SparseCase(b=3, s=(5, 9), lengths=((0, 0, 0), (3, 9, 0))),
    _TND,
    replace(_TND, tail=(2, 3), k=6),
    replace(_TND, mode=0, heads=8, k=12),
    replace(_TND, lengths=((7, 4, 4), (3, 4, 9)), heads=3),  # rows without keys
    replace(_TND, lengths=((0, 0), (0, 0)), tail=(3, 4)),
    replace(_TND, lengths=((), ())),
    SparseCase(s=(3, 5), heads=8, d=128, k=1024),
    replace(_TND, heads=16, d=128, k=2048),
]

PAGED_CASES = [
    SparseCase(lengths=((5, 3), (7, 6)), page=16),
    SparseCase(b=3, s=(4, 40), lengths=((4, 0, 3), (40, 17, 0)), heads=8, d=32, k=9, page=16),
    SparseCase(b=2, s=(1, 300), lengths=((1, 1), (300, 129)), heads=3, d=24, k=130, page=32),
    SparseCase(b=2, s=(6, 20), lengths=((6, 6), (17, 3)), mode=0, k=14, page=5),
    SparseCase(b=0, lengths=((), ()), page=16),
    replace(_TND, page=16),
    replace(_TND, tail=(2, 3), k=6, page=16),
    replace(_TND, lengths=((1, 1, 1), (64, 5, 33)), mode=0, heads=8, k=12, page=7),
    replace(_TND, lengths=((), ()), page=16),
    replace(_TND, heads=16, d=128, k=2048, page=16),
    SparseCase(b=2, s=(1, 48), lengths=((1, 1), (48, 33)), heads=8, d=128, k=1024, page=32),
]

COMPRESSED_PAGED_CASES = [
    SparseCase(s=(1, 75), lengths=((1, 1), (75, 32)), ratio=4, residuals=(1, 3), k=9, page=16),
    SparseCase(s=(13, 3), lengths=((13, 8), (3, 2)), ratio=4, k=3, page=5),
    replace(_TND, ratio=4, residuals=(0, 1, 2, 3), page=7),
]

# Selections that the operator itself does not make, but that its gradient takes.
GRAD_CASES = [
    SparseCase(s=(9, 9), pattern="padded", k=5),
    SparseCase(s=(9, 9), pattern="first", k=5),
    SparseCase(s=(9, 17), pattern="duplicates", k=8),
    SparseCase(s=(9, 9), pattern="unread", k=8),
    SparseCase(s=(9, 9), pattern="padded", k=5, selection_heads=False),
    replace(_TND, tail=(2, 3), k=6, selection_heads=False),
    SparseCase(s=(3, 5), heads=8, d=128, k=1024, selection_heads=False),
]


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    inputs = {
        "query": random.normal(*case.tokens(0), case.heads, case.d),
        "key": random.normal(*case.tokens(1), 1, case.d),
        "weights": random.normal(*case.tokens(0), case.heads),
    }
    if case.ratio > 1 and dtype.itemsize == 2:
        inputs["weights"] = inputs["weights"].float()
    pages = Pages.draw(case, random) if case.page else None
    if pages:
        inputs["key"] = pages.cache(case, inputs["key"])
    options = {
        **case.length_options(),
        "layout": case.layout,
        "sparse_count": case.k,
        "sparse_mode": case.mode,
        "return_values": not case.page,
        **(pages.options("layout_key") if pages else {}),
        **case.compression_options(),
    }
    return Sample("lightning_indexer", f"{case.id}-{dtype}", inputs, options)


def build_grad(case: SparseCase, dtype: torch.dtype) -> Sample:
    forward, random = build(case, dtype), Random(case.id, dtype)
    chosen = forward.call(reference)[0] if case in CASES else indices(case, random)
    return gradient_call(forward, (chosen,), random.normal(*chosen.shape))


def gradient_call(sample: Sample, outputs: Outputs, d_values: Tensor) -> Sample:
    options = dict(sample.options)
    del options["sparse_count"], options["return_values"]
    query, key, weights = sample.args
    inputs = {
        "query": query,
        "key": key,
        "d_values": d_values,
        "sparse_indices": outputs[0],
        "weights": weights,
    }
    return Sample("lightning_indexer_grad", sample.id, inputs, options)


def backward(sample: Sample, outputs: Outputs, d_values: Tensor) -> Outputs:
    return gradient_call(sample, outputs, d_values).call(torch.ops.ascend)


def expected_backward(sample: Sample, outputs: Outputs, d_values: Tensor) -> list[Expected]:
    return expected_gradient(gradient_call(sample, outputs, d_values))


def gradient_by_key(sample: Sample, outputs: Outputs, values: Tensor) -> Tensor:
    """The same for a key in whatever slot it stands: rounding may exchange two of them."""
    generator = torch.Generator().manual_seed(0)
    keys = max(1, sample.inputs["key"].shape[-3])
    of_key = torch.randn((*values.shape[:-1], keys), generator=generator)
    d_values = of_key.gather(-1, outputs[0].cpu().clamp(min=0).long())
    return d_values.to(values.device, values.dtype)


LIGHTNING_INDEXER = Operator(
    "lightning_indexer",
    CASES + PAGED_CASES + COMPRESSED + COMPRESSED_PAGED_CASES,
    build,
    Gradient(
        ("query", "key", "weights"),
        ("sparse_values",),
        backward,
        incoming=gradient_by_key,
        expected=expected_backward,
        takes=lambda case: not case.page and case.ratio == 1,
    ),
    on_device=on_device,
    sized=sized(heads=64, d=128),
    torch_npu=lambda x: torch_npu(
        "npu_lightning_indexer", x, layout_key=x.get("layout_key") or x["layout"]
    ),
)

LIGHTNING_INDEXER_GRAD = Operator(
    "lightning_indexer_grad",
    CASES + GRAD_CASES,
    build_grad,
    on_device=on_device,
    sized=sized(heads=64, d=128),
    torch_npu=lambda x: torch_npu("npu_lightning_indexer_grad", x, dy=x["d_values"]),
)

OPERATORS = [LIGHTNING_INDEXER, LIGHTNING_INDEXER_GRAD]
