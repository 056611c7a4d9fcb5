"""Calls that sparse_flash_attention and its gradient must refuse."""

from __future__ import annotations

from .sparse_errors import (
    DEVICE,
    count_rules,
    index_rules,
    length_rules,
    limit_rules,
    no_count_rules,
    option_rules,
    tensor_rules,
)
from .sparse_flash_attention import (
    OPERATORS,
    SPARSE_FLASH_ATTENTION,
    SPARSE_FLASH_ATTENTION_GRAD,
)

ROPE = ("query_rope", {"rope": 32})

WRONG_CALLS = [
    *(
        row
        for operator in OPERATORS
        for make in (tensor_rules, option_rules, length_rules, index_rules)
        for row in make(operator)
    ),
    *count_rules(SPARSE_FLASH_ATTENTION),
    *no_count_rules(SPARSE_FLASH_ATTENTION_GRAD),
    *limit_rules(
        SPARSE_FLASH_ATTENTION, DEVICE, "sparse_indices",
        Dr=ROPE, block=("sparse_block_size", {"block": 3}),
    ),
    *limit_rules(
        SPARSE_FLASH_ATTENTION_GRAD, DEVICE, "sparse_indices",
        Dr=ROPE, block=("sparse_block_size", {"block": 128}),
    ),
]  # fmt: skip
