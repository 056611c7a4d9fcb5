"""Calls that sparse_flash_attention, its gradient and its form for int8 must refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import methodcaller

import torch
from ascend_attn_check.samples.kv_quant_sparse_flash_attention import (
    KV_QUANT_SPARSE_FLASH_ATTENTION as INT8,
)
from ascend_attn_check.samples.sparse_flash_attention import (
    OPERATORS,
    SPARSE_FLASH_ATTENTION,
    SPARSE_FLASH_ATTENTION_GRAD,
)
from ascend_attn_ops.reference.call import Sample

from . import sparse_errors as shared
from .wrong_call import longer, statistics_rules, wrong_call

LIMITS = ("query", {"heads": 3}), ("query_rope", {"rope": 32})
BLOCKS = replace(shared.DEVICE, lengths=((5, 3), (7, 6)), page=16, block=32, k=1024)

wrong = partial(wrong_call, SPARSE_FLASH_ATTENTION)
wrong_int8 = partial(wrong_call, INT8, shared.BSND)


def extent_of_int8(good: Sample, name: str, axis: int) -> str:
    """Heads are those of query alone, tokens of keys those of key, and nobody reads value."""
    free = name == "value" or (name, axis) in (("query", -2), ("key", -3))
    return "" if free else shared.argument_of_extent(good, name, axis)


WRONG_CALLS = [
    *(
        row
        for operator in OPERATORS
        for make in (
            shared.tensor_rules, shared.option_rules, shared.length_rules, shared.index_rules,
        )
        for row in make(operator)
    ),
    *shared.limit_rules(
        SPARSE_FLASH_ATTENTION, shared.DEVICE, *LIMITS, ("sparse_block_size", {"block": 3})
    ),
    *shared.limit_rules(SPARSE_FLASH_ATTENTION_GRAD, shared.DEVICE, *LIMITS),
    *statistics_rules(SPARSE_FLASH_ATTENTION_GRAD, shared.BSND),
    *shared.token_rules(SPARSE_FLASH_ATTENTION, shared.DEVICE),
    *shared.page_rules(SPARSE_FLASH_ATTENTION),
    *shared.page_limit_rules(SPARSE_FLASH_ATTENTION, shared.DEVICE),
    *(
        wrong(shared.PAGES[0], id=axis, **{name: longer(axis)})
        for name in ("value", "key_rope")
        for axis in (-4, -3, -2)
    ),
    wrong(BLOCKS, "sparse_block_size: ", limits="A2"),
    *(x for x in shared.tensor_rules(INT8, argument_of=extent_of_int8)
      if not isinstance(x.change, dict) or "value" not in x.change),
    *(x for make in (shared.option_rules, shared.length_rules, shared.index_rules,
                     shared.page_rules) for x in make(INT8)),
    *shared.limit_rules(
        INT8, shared.DEVICE, ("query", {"heads": 3}), ("sparse_block_size", {"block": 2}),
        ("rope_head_dim", {"d": 544, "rope": 32}),
    ),
    *shared.token_rules(INT8, shared.DEVICE), *shared.page_limit_rules(INT8, shared.DEVICE),
    wrong_int8("expected 2", key_quant_mode=0), wrong_int8("expected 2", value_quant_mode=3),
    *(wrong_int8(id=size, tile_size=size) for size in (0, 2**31)),
    *(wrong_int8(id=size, rope_head_dim=size) for size in (-1, 73)),
    wrong_int8("key: dtype int8, got float8", TypeError,
               key=methodcaller("view", torch.float8_e4m3fn)),
    wrong_int8("query: sparse_flash_attention trains", NotImplementedError,
               change=methodcaller("requires_grad", ("query",))),
]  # fmt: skip
