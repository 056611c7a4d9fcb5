"""Calls that sparse_flash_attention and its gradient must refuse."""

from __future__ import annotations

from . import sparse_errors as shared
from .sparse_flash_attention import (
    OPERATORS,
    SPARSE_FLASH_ATTENTION,
    SPARSE_FLASH_ATTENTION_GRAD,
)

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
        N=HEADS, Dr=ROPE, block=BLOCK, no_ropes=("query_rope", {"rope": 0}),
    ),
    *shared.limit_rules(SPARSE_FLASH_ATTENTION_GRAD, shared.DEVICE, N=HEADS, Dr=ROPE),
    *shared.token_rules(SPARSE_FLASH_ATTENTION, shared.DEVICE),
]  # fmt: skip
