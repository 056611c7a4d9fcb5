"""Calls that the checked mode alone refuses: the CPU computes them, and no device can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from ascend_attn_check.samples.sparse import SparseCase

from support.samples import OPERATORS, Sample

_GRADIENTS = (
    "sparse_flash_attention_grad", "lightning_indexer_grad",
    "sparse_lightning_indexer_grad_kl_loss",
)  # fmt: skip


class CheckedCall(NamedTuple):
    id: str
    make: Callable[[], Sample]
    message: str


def with_a_gap(operator: str, layout: str, dtype: torch.dtype) -> Sample:
    """On the CPU it ends the row; the device takes it for an address."""
    lengths = None if layout == "BSND" else ((3, 2, 4), (5, 3, 4))
    case = SparseCase(layout=layout, lengths=lengths, rope=8, heads=8, index_heads=8)
    sample = OPERATORS[operator].make(case, torch.bfloat16)
    indices = sample.tensors["sparse_indices"].to(dtype, copy=True)
    # The last query of the first sequence sees all its keys.
    row = indices[0, -1, 0] if layout == "BSND" else indices[2, 0]
    assert len(row) > 1
    assert row[1] != -1
    row[1] = -1
    return sample.replace(sparse_indices=indices)


def selecting(operator: str, indices: list[int], block: int = 1, keys: int = 9) -> Sample:
    """One query that sees all keys, and selects these."""
    case = SparseCase(b=1, s=(1, keys), rope=8, heads=8, block=block, k=len(indices), absorbed=True)
    sample = OPERATORS[operator].make(case, torch.bfloat16)
    return sample.replace(sparse_indices=torch.tensor(indices, dtype=torch.int32).view(1, 1, 1, -1))


def without_pairs(*lengths: tuple[int, ...]) -> Sample:
    case = SparseCase(layout="TND", lengths=lengths, tail=(0, 4), index_heads=8, page=16)
    return OPERATORS["lightning_indexer"].make(case, torch.bfloat16)


def writing(slots: list[int], dtype: torch.dtype = torch.int32, **lengths: list[int]) -> Sample:
    key = torch.ones(8 if lengths else 4, 1, 16, dtype=torch.bfloat16)
    caches = torch.zeros(2, 2, 16, 1, 16, dtype=torch.bfloat16)
    inputs = {"key": key, "key_cache": caches[0], "slot_mapping": torch.tensor(slots, dtype=dtype)}
    options = {"value": key, "value_cache": caches[1], "scatter_mode": "None"}
    if lengths:
        options |= {x: torch.tensor(y, dtype=torch.int32) for x, y in lengths.items()}
        options["scatter_mode"] = "Alibi"
    return Sample("scatter_pa_kv_cache_", f"slots {slots}", inputs, options)


def _written(slots: list[int], found: str, dtype: torch.dtype = torch.int32,
             **lengths: list[int]) -> CheckedCall:  # fmt: skip
    make = partial(writing, slots, dtype, **lengths)
    return CheckedCall(f"slots{slots}-{dtype}", make, f"expected no slot twice .*, got {found}")


CHECKED_CALLS = [
    *(
        CheckedCall(f"{operator}-{layout}-{dtype}", partial(with_a_gap, operator, layout, dtype),
                    rf"sparse_indices: expected no -1 in the first .*, got -1 at \({place}, 1\)")
        for operator in _GRADIENTS
        for layout, place, dtype in (
            ("BSND", f"0, {SparseCase().s[0] - 1}, 0", torch.int32), ("TND", "2, 0", torch.int64))
    ),
    CheckedCall("behind a gap", partial(selecting, "sparse_flash_attention", [2, -1, 1]),
                r"nothing behind the first -1 .*, got 1 at \(0, 0, 0, 2\)"),
    *(
        CheckedCall(f"no pairs {lengths}", partial(without_pairs, *lengths),
                    "actual_seq_lengths_key: expected a sequence that has queries and keys")
        for lengths in (((3, 2), (0, 0)), ((3, 0), (0, 5)))
    ),
    _written([9, 5, -1, 9], "9 written by entries 0 and 3 "),
    _written([9, 5, -1, 9], "9 written by entries 0 and 3 ", torch.int64),
    # Two sequences of four rows and one head, of which the last three are kept.
    _written([2, 0], "2 written by entries 1 and 0 ", compress_lens=[3, 3], seq_lens=[4, 4]),
]  # fmt: skip
# Rows that end within a block, or have a gap between blocks, and rows of a cache that are skipped.
RIGHT_CALLS = [
    partial(selecting, "sparse_flash_attention_grad", [0, 1], 16, 23),
    partial(selecting, "sparse_flash_attention", [0, -1, 1], 8, 24),
    partial(selecting, "sparse_flash_attention", [1, 0], 16, 23), partial(writing, [-1, 5, -1, 4]),
    partial(writing, [3, 0], compress_lens=[3, 3], seq_lens=[4, 4]),
]  # fmt: skip
