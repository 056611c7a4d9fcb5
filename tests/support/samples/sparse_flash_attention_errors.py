"""Calls that sparse_flash_attention and its gradient must refuse."""

from __future__ import annotations

from dataclasses import replace

from ascend_attn_ops.check.samples.sparse_flash_attention import (
    OPERATORS,
    SPARSE_FLASH_ATTENTION,
    SPARSE_FLASH_ATTENTION_GRAD,
)

from . import sparse_errors as shared
from .wrong_call import WrongCall, longer, put, statistics_rules

HEADS = ("query", {"heads": 3})
ROPE = ("query_rope", {"rope": 32})
BLOCK = ("sparse_block_size", {"block": 3})

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
        SPARSE_FLASH_ATTENTION, shared.DEVICE,
        N=HEADS, Dr=ROPE, block=BLOCK,
    ),
    *shared.limit_rules(SPARSE_FLASH_ATTENTION_GRAD, shared.DEVICE, N=HEADS, Dr=ROPE),
    *statistics_rules(SPARSE_FLASH_ATTENTION_GRAD, shared.BSND),
    *shared.token_rules(SPARSE_FLASH_ATTENTION, shared.DEVICE),
    *shared.page_rules(SPARSE_FLASH_ATTENTION),
    *shared.page_limit_rules(SPARSE_FLASH_ATTENTION, shared.DEVICE),
    *(
        WrongCall(
            f"pages-{name} axis {axis} too long", SPARSE_FLASH_ATTENTION, shared.PAGES[0],
            put(name, longer(axis)), name,
        )
        for name in ("value", "key_rope")
        for axis in (-4, -3, -2)
    ),
    WrongCall(
        "limits-pages of whole blocks", SPARSE_FLASH_ATTENTION,
        replace(shared.DEVICE, lengths=((5, 3), (7, 6)), page=16, block=32, k=1024), None,
        "sparse_block_size", limits="A2",
    ),
]  # fmt: skip
