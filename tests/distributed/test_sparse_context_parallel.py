"""Sparse attention with sequences over several ranks: the results are those of one process."""

from __future__ import annotations

import ascend_attn_ops as ops
import torch
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import KEYS, QUERY_SIDE, Sizes, inputs, of_ranks, one_process, relative_error
from support.processes import on_ranks, rank_counts
from torch.distributed import ProcessGroup

SIZES = Sizes()
# Even, uneven, packed, empty ones between, and fewer tokens than ranks.
LENGTHS = [[32], [37], [5, 6, 29, 64], [0, 3, 0, 4, 11, 13, 0], [2], [1, 0, 1]]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def compare(group: ProcessGroup, lengths: list[int], dtype: torch.dtype, order: str) -> None:
    layout = "BSND" if len(lengths) == 1 and lengths[0] % 2 else "TND"
    with ops.limits(None):
        shards = SequenceShards(lengths, group, order)
        tokens = inputs(lengths, dtype, SIZES)
        expected = one_process(tokens, lengths, SIZES)
        actual = of_ranks(tokens, shards, SIZES, layout=layout)
    for name in QUERY_SIDE:
        assert torch.equal(actual[name], shards.shard(expected[name])), name
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype)
    if tolerance is not None:
        assert relative_error(actual["loss"], expected["loss"]) < tolerance
        for name in KEYS:
            whole = shards.unshard(actual[f"d_{name}"])
            assert relative_error(whole, expected[f"d_{name}"]) <= tolerance, name


def compare_all(group: ProcessGroup) -> None:
    for lengths in LENGTHS:
        for dtype in DTYPES:
            compare(group, lengths, dtype, "zigzag")
        compare(group, lengths, torch.float64, "contiguous")


@rank_counts(3, 1, 2, 4)
def test_results_are_those_of_one_process(ranks: int) -> None:
    on_ranks(ranks, compare_all)


def key_gradient_errors(group: ProcessGroup) -> dict[str, tuple[float, float]]:
    lengths, sizes = [700, 324], Sizes(heads=8, latent=64, rope=16, index=32, count=64)
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        half = inputs(lengths, torch.bfloat16, sizes)
        truth = one_process({name: x.double() for name, x in half.items()}, lengths, sizes)
        one, ours = one_process(half, lengths, sizes), of_ranks(half, shards, sizes)
    return {
        name: (
            relative_error(shards.unshard(ours[f"d_{name}"]), truth[f"d_{name}"]),
            relative_error(one[f"d_{name}"], truth[f"d_{name}"]),
        )
        for name in KEYS
    }


def test_key_gradients_in_bfloat16_are_nearly_as_exact() -> None:
    errors = on_ranks(4, key_gradient_errors)[0]
    for name, (ours, one) in errors.items():
        print(f"{name}: {ours:.2e} on 4 ranks, {one:.2e} in one process")
        assert ours <= 1.5 * one, name
