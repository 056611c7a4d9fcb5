"""Samples of quant_lightning_indexer."""

from __future__ import annotations

from dataclasses import replace

import torch
from ascend_attn_ops.reference.call import Sample

from .lightning_indexer import CASES, PAGED_CASES
from .randomness import Random
from .record import Operator
from .sparse import Pages, SparseCase, on_device, sized
from .torch_npu_calls import torch_npu


def build(case: SparseCase, dtype: torch.dtype) -> Sample:
    """Numbers over the whole range of int8. Weights and scales are float16 or float32."""
    random = Random(case.id, torch.float16 if dtype.itemsize == 2 else torch.float32)
    tokens, heads = case.tokens(0), case.heads
    inputs = {
        "query": random.numbers(*tokens, heads, case.d, dtype=torch.int8),
        "key": random.numbers(*case.tokens(1), 1, case.d, dtype=torch.int8),
        "weights": random.normal(*tokens, heads),
        "query_dequant_scale": random.normal(*tokens, heads).abs() / 64,
        "key_dequant_scale": random.normal(*case.tokens(1), 1).abs() / 64,
    }
    pages = Pages.draw(case, random) if case.page else None
    if pages:
        for name in ("key", "key_dequant_scale"):
            inputs[name] = pages.cache(case, inputs[name])
    options = {
        **case.length_options(),
        "layout": case.layout,
        "sparse_count": case.k,
        "sparse_mode": case.mode,
        **(pages.options("layout_key") if pages else {}),
    }
    return Sample("quant_lightning_indexer", f"{case.id}-{dtype}", inputs, options)


QUANT_LIGHTNING_INDEXER = Operator(
    "quant_lightning_indexer",
    # The kernel is that of lightning_indexer.
    [*CASES[::2], CASES[-2], replace(CASES[0], heads=64, d=128, k=1024), *PAGED_CASES],
    build,
    inference_only=True,
    on_device=on_device,
    sized=sized(heads=64, d=128),
    torch_npu=lambda x: torch_npu(
        "npu_quant_lightning_indexer", x, layout_key=x.get("layout_key") or x["layout"]
    ),
)

OPERATORS = [QUANT_LIGHTNING_INDEXER]
