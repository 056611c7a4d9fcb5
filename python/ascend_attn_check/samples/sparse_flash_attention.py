"""Samples of sparse_flash_attention and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
)
from ascend_attn_ops.reference.bounds.sparse_flash_attention import expected_gradient
from ascend_attn_ops.reference.call import Outputs, Sample
from torch import Tensor

from .randomness import Random
from .record import Gradient, Operator
from .sparse import Pages, SparseCase, indices, on_device, sized
from .torch_npu_calls import torch_npu

_TND = SparseCase(layout="TND", lengths=((3, 0, 6, 0), (5, 2, 9, 0)))

CASES = [
    SparseCase(rope=8),
    SparseCase(),
    SparseCase(b=1, s=(63, 77), heads=4, k=16, rope=16),
    SparseCase(s=(33, 33), heads=3, d=24, k=7, rope=8, pattern="padded"),
    SparseCase(s=(7, 19), heads=8, k=1, rope=8),
    SparseCase(s=(1, 13), heads=64, d=32, k=8),
    SparseCase(b=3, s=(5, 9), heads=1, d=17, k=9, rope=5),
    SparseCase(s=(6, 6), heads=2, k=20, mode=0, pattern="padded"),
    SparseCase(s=(9, 40), heads=4, k=12, mode=0, rope=16),
    SparseCase(s=(11, 5), k=4, rope=8),  # rows without keys
    SparseCase(s=(11, 5), k=4, mode=0),
    SparseCase(s=(9, 9), pattern="first", k=5, rope=8),
    SparseCase(s=(9, 9), pattern="hole", k=5),
    SparseCase(s=(9, 17), pattern="duplicates", k=8, rope=8),
    SparseCase(s=(9, 17), pattern="future", k=8),
    SparseCase(s=(9, 9), pattern="unread", k=8, rope=8),
    SparseCase(s=(9, 30), block=8, k=3, rope=8),
    SparseCase(s=(9, 30), block=8, k=9, mode=0, pattern="padded"),
    SparseCase(s=(21, 37), block=16, k=2, pattern="duplicates"),
    SparseCase(s=(10, 150), block=64, k=2, rope=8),
    # So many keys that they are divided into parts.
    SparseCase(b=1, s=(2, 1400), heads=3, d=16, k=1000, rope=8),
    SparseCase(b=1, s=(3, 1500), heads=2, d=16, block=64, k=20, mode=0, pattern="padded"),
    SparseCase(b=1, s=(2, 1200), heads=5, d=8, k=900, pattern="future"),
    SparseCase(s=(40, 30), block=8, k=4, rope=8),  # rows without keys, clipped blocks
    SparseCase(s=(9, 9), absorbed=True, rope=8),
    SparseCase(b=0),
    SparseCase(s=(0, 7), rope=8),
    SparseCase(s=(5, 0)),
    SparseCase(s=(5, 0), mode=0, rope=8),
    # Counts shorter than S: queries beyond are zero, keys beyond are never read.
    SparseCase(b=4, s=(6, 9), lengths=((6, 3, 0, 4), (9, 5, 4, 0)), rope=8),
    SparseCase(b=2, s=(6, 20), lengths=((5, 6), (17, 9)), mode=0, block=8, k=3),
    SparseCase(b=3, s=(5, 9), lengths=((0, 0, 0), (3, 9, 0)), rope=8),
    SparseCase(b=2, s=(5, 9), lengths=((5, 5), (9, 9)), absorbed=True),
    SparseCase(b=3, s=(6, 9), lengths=((6, 3, 4), (9, 5, 4)), rope=8, absorbed=True),
    SparseCase(s=(9, 9), pattern="padded", k=5, rope=8, selection_heads=False),
    SparseCase(heads=0, rope=8),
    SparseCase(d=0, rope=8),
    SparseCase(s=(6, 9), lengths=((6, 3), (9, 5)), selection_heads=False),
    replace(_TND, tail=(2, 3), k=6, selection_heads=False),
    replace(_TND, rope=8),
    _TND,
    replace(_TND, tail=(2, 3), rope=8, k=6, pattern="padded"),
    replace(_TND, mode=0, heads=8, k=12),
    replace(_TND, lengths=((7, 4, 4), (3, 4, 9)), rope=8, heads=3),  # rows without keys
    replace(_TND, lengths=((5, 12), (21, 17)), block=8, k=2, tail=(1, 4)),
    replace(_TND, lengths=((20,), (33,)), block=16, k=9, rope=8, pattern="padded"),
    replace(_TND, lengths=((5, 6), (5, 9)), pattern="first"),
    replace(_TND, lengths=((0, 0), (0, 0)), tail=(3, 4)),
    replace(_TND, lengths=((), ())),
    SparseCase(s=(3, 5), heads=8, d=512, rope=64, k=1024, absorbed=True),
    replace(_TND, heads=16, d=512, rope=64, k=1024, absorbed=True),
    SparseCase(s=(3, 5), heads=8, d=512, k=2176, absorbed=True),
]

PAGED_CASES = [
    SparseCase(lengths=((5, 3), (7, 6)), rope=8, page=16),
    SparseCase(b=3, s=(4, 40), lengths=((4, 0, 3), (40, 17, 0)), heads=8, d=32, k=9, page=16),
    SparseCase(b=2, s=(1, 300), lengths=((1, 1), (300, 129)), heads=3, d=24, k=110, page=32),
    SparseCase(b=2, s=(6, 20), lengths=((6, 6), (17, 3)), mode=0, k=14, page=5, absorbed=True),
    SparseCase(b=2, s=(9, 60), lengths=((9, 7), (60, 33)), block=8, k=4, rope=8, page=16),
    SparseCase(b=2, s=(9, 17), lengths=((9, 7), (17, 9)), pattern="padded", k=8, page=16),
    SparseCase(b=2, s=(9, 17), lengths=((9, 7), (17, 9)), pattern="future", k=8, page=16),
    SparseCase(b=0, lengths=((), ()), page=16),
    replace(_TND, page=16, absorbed=True, rope=8),
    replace(_TND, tail=(2, 3), k=6, pattern="hole", selection_heads=False, page=16),
    replace(_TND, lengths=((1, 1, 1), (64, 5, 33)), mode=0, heads=8, k=12, page=7),
    replace(_TND, lengths=((), ()), page=16),
    replace(_TND, heads=16, d=512, rope=64, k=1024, absorbed=True, page=16),
    SparseCase(
        b=2, s=(1, 48), lengths=((1, 1), (48, 33)), heads=8, d=512, rope=64, k=1024, page=32,
        absorbed=True,
    ),
]  # fmt: skip

# On an NPU the launch gathers the keys: those that the tokens select, or all if they are fewer.
PAGED_CASES += [
    replace(case, statistics=True)
    for case in [
        *(case for case in PAGED_CASES if case.k < 1024),
        SparseCase(b=2, s=(3, 60), lengths=((2, 3), (60, 33)), block=8, k=4, page=16, mode=0),
        SparseCase(b=2, s=(3, 90), lengths=((2, 3), (90, 33)), pattern="first", k=5, page=16),
        SparseCase(b=2, s=(3, 90), lengths=((3, 2), (90, 71)), pattern="hole", k=5, page=32),
        SparseCase(b=2, s=(3, 90), lengths=((3, 2), (90, 2)), pattern="future", k=5, page=32),
        replace(_TND, lengths=((5, 0, 2), (90, 3, 60)), tail=(2, 3), block=8, k=3, page=16),
        replace(_TND, lengths=((5, 6), (3, 90)), pattern="duplicates", k=4, page=32, rope=8),
    ]
]


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    inputs = {
        "query": random.normal(*case.tokens(0), case.heads, case.d),
        "key": random.normal(*case.tokens(1), 1, case.d),
        "value": random.normal(*case.tokens(1), 1, case.d),
        "sparse_indices": indices(case, random),
    }
    rope = {
        "query_rope": random.normal(*case.tokens(0), case.heads, case.rope),
        "key_rope": random.normal(*case.tokens(1), 1, case.rope),
    }
    paged: dict[str, Any] = {}
    if case.page:
        pages = Pages.draw(case, random)
        for caches, name in ((inputs, "key"), (inputs, "value"), (rope, "key_rope")):
            caches[name] = pages.cache(case, caches[name])
        paged = {**pages.options("layout_kv"), "return_softmax_lse": case.statistics}
    if case.absorbed:
        inputs["value"] = inputs["key"]
    options = {
        "scale_value": max(case.d + case.rope, 1) ** -0.5,
        **case.length_options(),
        **{name: x if case.rope else None for name, x in rope.items()},
        "sparse_block_size": case.block,
        "layout": case.layout,
        "sparse_mode": case.mode,
        **paged,
    }
    return Sample("sparse_flash_attention", f"{case.id}-{dtype}", inputs, options)


def build_grad(case: SparseCase, dtype: torch.dtype) -> Sample:
    return gradient_of(build(case, dtype), Random(case.id, dtype))


def gradient_of(forward: Sample, random: Random) -> Sample:
    outputs = forward.call(reference)
    return gradient_call(forward, outputs, random.normal(*outputs[0].shape))


def gradient_call(forward: Sample, outputs: Outputs, d_out: Tensor) -> Sample:
    out, softmax_max, softmax_sum = outputs
    return forward.of_gradient(
        d_out=d_out, out=out, softmax_max=softmax_max, softmax_sum=softmax_sum
    )


def of_arguments(sample: Sample, gradients: Sequence[Tensor]) -> Outputs:
    """One tensor that is key and value has the sum of both gradients."""
    d_query, d_key, d_value, *d_ropes = gradients
    if sample.inputs["value"] is sample.inputs["key"]:
        d_key = d_value = d_key + d_value
    return d_query, d_key, d_value, *d_ropes


def backward(sample: Sample, outputs: Outputs, d_out: Tensor) -> Outputs:
    return of_arguments(sample, gradient_call(sample, outputs, d_out).call(torch.ops.ascend))


def expected_backward(sample: Sample, outputs: Outputs, d_out: Tensor) -> list[Expected]:
    bounds = expected_gradient(gradient_call(sample, outputs, d_out))
    exact = of_arguments(sample, [x.exact for x in bounds])
    allowed = of_arguments(sample, [x.allowed for x in bounds])
    names = (x.name for x in bounds)
    return [Expected(*one) for one in zip(names, exact, allowed, strict=True)]


SPARSE_FLASH_ATTENTION = Operator(
    "sparse_flash_attention",
    CASES + PAGED_CASES,
    build,
    Gradient(
        ("query", "key", "value", "query_rope", "key_rope"),
        ("out",),
        backward,
        expected=expected_backward,
        takes=lambda case: not case.page,
    ),
    on_device=on_device,
    sized=sized(heads=8, d=512, rope=64, absorbed=True),
    torch_npu=lambda x: torch_npu(
        "npu_sparse_flash_attention",
        x,
        layout_kv=x.get("layout_kv") or x["layout"],
        attention_mode=2,
    ),
)

SPARSE_FLASH_ATTENTION_GRAD = Operator(
    "sparse_flash_attention_grad",
    CASES,
    build_grad,
    on_device=on_device,
    sized=sized(heads=8, d=512, rope=64, absorbed=True),
    torch_npu=partial(
        torch_npu,
        "npu_sparse_flash_attention_grad",
        pre_tokens=2**31 - 1,
        next_tokens=2**31 - 1,
        attention_mode=2,
    ),
)

OPERATORS = [SPARSE_FLASH_ATTENTION, SPARSE_FLASH_ATTENTION_GRAD]
