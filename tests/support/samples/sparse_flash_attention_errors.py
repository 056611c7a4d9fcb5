"""Calls that sparse_flash_attention and its gradient must refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ascend_attn_check.samples.sparse_flash_attention import (
    OPERATORS,
    SPARSE_FLASH_ATTENTION,
    SPARSE_FLASH_ATTENTION_GRAD,
)

from . import sparse_errors as shared
from .wrong_call import longer, statistics_rules, wrong_call

LIMITS = ("query", {"heads": 3}), ("query_rope", {"rope": 32})
BLOCKS = replace(shared.DEVICE, lengths=((5, 3), (7, 6)), page=16, block=32, k=1024)

wrong = partial(wrong_call, SPARSE_FLASH_ATTENTION)

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
]  # fmt: skip
