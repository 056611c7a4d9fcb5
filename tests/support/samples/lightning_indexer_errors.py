"""Calls that lightning_indexer, its gradient and quant_lightning_indexer must refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from ascend_attn_check.samples.lightning_indexer import LIGHTNING_INDEXER, LIGHTNING_INDEXER_GRAD
from ascend_attn_check.samples.quant_lightning_indexer import QUANT_LIGHTNING_INDEXER as OF_INT8
from ascend_attn_check.samples.sparse import SparseCase
from torch import Tensor

from . import sparse_errors as shared
from .wrong_call import wrong_call

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=128, k=1024)
COMPRESSED = SparseCase(s=(9, 2), heads=8, d=128, k=512, ratio=4)
HEADS = ("query", {"heads": 65})

wrong = partial(wrong_call, LIGHTNING_INDEXER)
of_int8 = partial(wrong_call, OF_INT8, replace(DEVICE, heads=64))

WRONG_CALLS = [
    *(
        row
        for operator in (LIGHTNING_INDEXER, LIGHTNING_INDEXER_GRAD, OF_INT8)
        for make in (shared.tensor_rules, shared.option_rules, shared.length_rules)
        for row in make(operator)
    ),
    *shared.index_rules(LIGHTNING_INDEXER_GRAD),
    *shared.compression_rules(LIGHTNING_INDEXER),
    *shared.page_rules(LIGHTNING_INDEXER), *shared.page_rules(OF_INT8),
    *shared.page_limit_rules(LIGHTNING_INDEXER, DEVICE), *shared.page_limit_rules(OF_INT8, DEVICE),
    *shared.token_rules(LIGHTNING_INDEXER, DEVICE), *shared.token_rules(OF_INT8, DEVICE),
    wrong(shared.PAGES[0], return_values=True),
    *shared.limit_rules(
        LIGHTNING_INDEXER, DEVICE, HEADS, ("sparse_count", {"k": 9217}),
        ("sparse_count", {"k": 2049}),
    ),
    wrong(replace(COMPRESSED, heads=7), "query: ", limits="A2"),
    wrong(replace(COMPRESSED, k=9216), "sparse_count: ", limits="A2"),
    wrong(COMPRESSED, "", TypeError, weights=Tensor.bfloat16, limits="A2"),
    wrong(COMPRESSED, "cmp_ratio: ", limits="950"),
    *shared.limit_rules(
        LIGHTNING_INDEXER_GRAD, DEVICE, HEADS, ("sparse_indices", {"k": 2049}),
        ("sparse_indices", {"mode": 0}),  # fewer keys than slots
    ),
    wrong_call(
        LIGHTNING_INDEXER_GRAD, DEVICE, "", TypeError, weights=Tensor.float, limits="A2"
    ),
    # float8 and uint8 are of Ascend 950.
    *(
        of_int8("int8", TypeError, id=dtype, query=lambda x, dtype=dtype: x.to(dtype))
        for dtype in (torch.float8_e4m3fn, torch.uint8, torch.bfloat16)
    ),
    of_int8("expected 0", query_quant_mode=1),
    of_int8("expected 0", key_quant_mode=1),
    of_int8("float16", TypeError, query_dequant_scale=Tensor.float, limits="A2"),
    of_int8("float16", TypeError, key_dequant_scale=Tensor.float, limits="A2"),
    *shared.limit_rules(
        OF_INT8, DEVICE, HEADS, ("sparse_count", {"k": 2049}), of_float32="weights: "
    ),
]  # fmt: skip
