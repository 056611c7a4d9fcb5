"""DeepSeek-V4's attention with sequences over several ranks: the results are those of one process.

A rank's tokens begin and end inside of windows, and some ranks have fewer tokens than a window or
than a compressed key.
"""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
import torch.distributed as dist
from ascend_attn_ops.distributed import SequenceShards
from compressed_layer import KINDS, Kind, inputs, of_a_rank, of_one_process, run
from sparse_layer import relative_error
from support.processes import on_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

# Even, no multiple of a ratio, packed, shorter than a window, fewer tokens than ranks.
LENGTHS = [[32], [37], [5, 6, 29, 64], [0, 3, 0, 11, 13], [2]]
# A rank computes these for its own tokens, or keys, alone.
BIT_FOR_BIT = (
    "cmp_kv", "indices", "out", "attended", "lse", "d_query", "d_query_index", "d_weights",
)  # fmt: skip


def whole(shards: SequenceShards, kind: Kind, name: str, x: Tensor) -> Tensor:
    """A result of all ranks."""
    if name == "loss":
        return x
    if name == "d_sink" or name.startswith("d_bias"):
        total = x.clone()
        dist.all_reduce(total, group=shards.group)
        return total
    return (shards.compressed(kind.ratio) if name == "cmp_kv" else shards).unshard(x)


def compare(
    shards: SequenceShards, name: str, dtype: torch.dtype, layout: str = "TND", **options: Any
) -> None:
    kind, lengths = KINDS[name], list(shards.lengths)
    with ops.limits(None):
        tokens = inputs(lengths, kind, dtype)
        expected = run(tokens, of_one_process(lengths), kind, **options)
        local = {key: shards.shard(x) for key, x in tokens.items()}
        batched = layout == "BSND"
        actual = run(local, of_a_rank(shards, layout), kind, batched=batched, **options)
    assert actual.keys() == expected.keys()
    for key, x in actual.items():
        y = expected[key]
        if key in BIT_FOR_BIT:
            assert torch.equal(whole(shards, kind, key, x), y), key
        else:
            # Summed over the ranks.
            close = 1e-13 if dtype == torch.float64 else 1e-2
            assert relative_error(whole(shards, kind, key, x), y) <= close, key


def compare_all(group: ProcessGroup, name: str) -> None:
    for lengths in LENGTHS:
        layout = "BSND" if lengths == [37] else "TND"
        compare(SequenceShards(lengths, group, "contiguous"), name, torch.float64, layout)
        compare(SequenceShards(lengths, group), name, torch.bfloat16, layout)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_results_are_those_of_one_process(name: str, ranks: int) -> None:
    on_ranks(ranks, compare_all, name)


WINDOWS: list[dict[str, Any]] = [
    {"ori_win_left": 3, "ori_win_right": 2},
    {"ori_win_left": -1},
    {"ori_win_left": 2, "ori_win_right": -1},
    {"ori_win_left": 0, "cmp_mask_mode": 0},
    {"ori_mask_mode": 3},
    {"ori_mask_mode": 0},
]


def with_other_windows(group: ProcessGroup) -> None:
    for lengths in ([5, 6, 29], [37]):
        for order in ("contiguous", "zigzag"):
            shards = SequenceShards(lengths, group, order)  # type: ignore[arg-type]
            for options in WINDOWS:
                compare(shards, "HCA", torch.float64, **options)


def test_other_windows() -> None:
    on_ranks(3, with_other_windows)


def keys_of_ranks(group: ProcessGroup) -> list[list[int]]:
    shards = SequenceShards([13], group, "contiguous").compressed(4)
    assert shards is not None
    return [shards.positions().tolist(), list(shards.lengths)]


def test_a_key_belongs_to_the_rank_of_its_last_token() -> None:
    # Tokens 0..3, 3..6, 6..9, 9..13: one rank has the last token of no key.
    assert [keys for keys, _ in on_ranks(4, keys_of_ranks)] == [[], [0], [1], [2]]
