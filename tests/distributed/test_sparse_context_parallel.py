"""Sparse attention with sequences over several ranks: the results are those of one process."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import sparse_layer
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import KEYS, QUERY_SIDE, Sizes, inputs, of_ranks, one_process, relative_error
from support.processes import on_ranks, rank_counts
from torch.distributed import ProcessGroup

SIZES = Sizes()
# Even, uneven, packed, empty ones between, and fewer tokens than ranks.
LENGTHS = [[32], [37], [5, 6, 29, 64], [0, 3, 0, 4, 11, 13, 0], [2], [1, 0, 1]]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LOSSES: list[dict[str, Any]] = [
    {"reduction": "mean"}, {"normalizer": 7}, {"normalizer": torch.tensor([2.5])},
]  # fmt: skip


def compare(
    group: ProcessGroup, lengths: list[int], dtype: torch.dtype, order: str, **loss: Any
) -> None:
    layout = "BSND" if len(lengths) == 1 and lengths[0] % 2 else "TND"
    with ops.limits(None):
        shards = SequenceShards(lengths, group, order)
        tokens = inputs(lengths, dtype, SIZES)
        if loss:
            tokens["token_weight"] = torch.arange(sum(lengths), dtype=dtype) % 3
        expected = one_process(tokens, lengths, SIZES, loss=loss)
        actual = of_ranks(tokens, shards, SIZES, layout, loss=loss)
    for name in QUERY_SIDE:
        # A loss that the ranks divide by a sum of theirs is the same but for rounding.
        if not loss or name not in ("d_query_index", "d_weights"):
            assert torch.equal(actual[name], shards.shard(expected[name])), name
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype)
    if tolerance is not None:
        assert relative_error(actual["loss"], expected["loss"]) < tolerance
        for name in (*KEYS, "query_index", "weights"):
            whole = shards.unshard(actual[f"d_{name}"])
            assert relative_error(whole, expected[f"d_{name}"]) <= tolerance, name


def compare_all(group: ProcessGroup) -> None:
    for lengths in LENGTHS:
        for dtype in DTYPES:
            compare(group, lengths, dtype, "zigzag")
        compare(group, lengths, torch.float64, "contiguous")
    for loss in LOSSES:
        compare(group, [19, 6, 40], torch.float64, "zigzag", **loss)


@rank_counts(3, 1, 2, 4)
def test_results_are_those_of_one_process(ranks: int) -> None:
    on_ranks(ranks, compare_all)


def key_gradient_errors(group: ProcessGroup) -> sparse_layer.Errors:
    lengths, sizes = [700, 324], Sizes(heads=8, latent=64, rope=16, index=32, count=64)
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        half = inputs(lengths, torch.bfloat16, sizes)
        truth = one_process({name: x.double() for name, x in half.items()}, lengths, sizes)
        one, ours = one_process(half, lengths, sizes), of_ranks(half, shards, sizes)
    return sparse_layer.errors(shards, [f"d_{name}" for name in KEYS], ours, one, truth)


def test_key_gradients_in_bfloat16_are_nearly_as_exact() -> None:
    sparse_layer.assert_nearly_as_exact(on_ranks(4, key_gradient_errors)[0])


def other_options(group: ProcessGroup) -> None:
    """Without ropes, with value apart from key, blocks of keys, and in mode 0."""
    lengths = [19, 6, 40]
    ends = torch.tensor(lengths).cumsum(0).int()
    packed = {"layout": "TND", "actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        tokens = inputs(lengths, torch.float64, SIZES)
        tokens["value"] = tokens["latent"].flip(-1)
        names = ("query", "latent", "value")
        for mode, block in ((3, 1), (0, 1), (3, 4)):
            # Slots behind those that are read hold any keys that exist.
            blocks = torch.tensor([-(-n // block) for n in lengths for _ in range(n)])
            indices = (torch.arange(SIZES.count) % blocks[:, None]).int().unsqueeze(1)
            options = {"scale_value": 0.2, "sparse_mode": mode, "sparse_block_size": block}
            whole = {name: tokens[name].clone().requires_grad_() for name in names}
            local = {name: shards.shard(tokens[name]).requires_grad_() for name in names}
            expected, *_ = ops.sparse_flash_attention(*whole.values(), indices, **packed, **options)
            actual, *_ = distributed.sparse_flash_attention(
                *local.values(), shards.shard(indices), shards=shards, **options
            )
            assert torch.equal(actual, shards.shard(expected))
            expected.backward(tokens["d_out"])
            actual.backward(shards.shard(tokens["d_out"]))
            for name in names:
                found = shards.unshard(local[name].grad)
                assert relative_error(found, whole[name].grad) <= 1e-14, name


def test_options_of_the_attention() -> None:
    on_ranks(3, other_options)
