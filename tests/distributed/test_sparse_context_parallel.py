"""Sparse attention with sequences over several ranks: the results are those of one process."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import ascend_attn_ops as ops
import pytest
import sparse_layer
import torch
import torch.distributed as dist
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from compressed_layer import COUNT, CSA, INDEX_DIM, KINDS, of_a_rank, of_one_process, run
from compressed_layer import inputs as compressed_inputs
from sparse_layer import KEYS, QUERY_SIDE, Sizes, inputs, of_ranks, one_process, relative_error
from support.processes import on_ranks, rank_counts
from torch import Tensor
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


# DeepSeek-V4's attention. A rank's tokens begin and end inside of windows, and some ranks have
# fewer tokens than a window or than a compressed key.

# Even, no multiple of a ratio, packed, shorter than a window, fewer tokens than ranks.
COMPRESSED_LENGTHS = [[32], [37], [5, 6, 29, 64], [0, 3, 0, 11, 13], [2]]
# A rank computes these for its own tokens, or keys, alone.
BIT_FOR_BIT = (
    "cmp_kv", "indices", "out", "attended", "lse", "d_query", "d_query_index", "d_weights",
)  # fmt: skip


def whole(shards: SequenceShards, kind: Any, name: str, x: Tensor) -> Tensor:
    """A result of all ranks."""
    if name == "loss":
        return x
    if name == "d_sink" or name.startswith("d_bias"):
        total = x.clone()
        dist.all_reduce(total, group=shards.group)
        return total
    return (shards.compressed(kind.ratio) if name == "cmp_kv" else shards).unshard(x)


def compare_layer(
    shards: SequenceShards, name: str, dtype: torch.dtype, layout: str = "TND", **options: Any
) -> None:
    kind, lengths = KINDS[name], list(shards.lengths)
    with ops.limits(None):
        tokens = compressed_inputs(lengths, kind, dtype)
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


WINDOWS: list[dict[str, Any]] = [
    {"ori_win_left": 3, "ori_win_right": 2}, {"ori_win_left": -1},
    {"ori_win_left": 2, "ori_win_right": -1}, {"ori_win_left": 0, "cmp_mask_mode": 0},
    {"ori_mask_mode": 3}, {"ori_mask_mode": 0},
]  # fmt: skip


def compare_every_kind(group: ProcessGroup, name: str) -> None:
    for lengths in COMPRESSED_LENGTHS:
        layout = "BSND" if lengths == [37] else "TND"
        compare_layer(SequenceShards(lengths, group, "contiguous"), name, torch.float64, layout)
        compare_layer(SequenceShards(lengths, group), name, torch.bfloat16, layout)
    orders = ("contiguous", "zigzag") if name == "HCA" else ()
    for lengths, order, window in product(([5, 6, 29], [37]), orders, WINDOWS):
        compare_layer(SequenceShards(lengths, group, order), name, torch.float64, **window)


@rank_counts(3, 1, 2, 4)
@pytest.mark.parametrize("name", KINDS)
def test_compressed_results_are_those_of_one_process(name: str, ranks: int) -> None:
    on_ranks(ranks, compare_every_kind, name)


def compressed_key_gradient_errors(group: ProcessGroup) -> sparse_layer.Errors:
    lengths, kind = [700, 324], KINDS["HCA"]
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        half = compressed_inputs(lengths, kind, torch.bfloat16)
        exact = {name: x.double() for name, x in half.items()}
        truth, one = (run(x, of_one_process(lengths), kind) for x in (exact, half))
        local = {name: shards.shard(x) for name, x in half.items()}
        ours = run(local, of_a_rank(shards), kind)
    return sparse_layer.errors(shards, ("d_ori_kv", "d_values"), ours, one, truth)


@pytest.mark.parametrize("errors", [key_gradient_errors, compressed_key_gradient_errors])
def test_key_gradients_in_bfloat16_are_nearly_as_exact(errors: Any) -> None:
    sparse_layer.assert_nearly_as_exact(on_ranks(4, errors)[0])


def keys_of_ranks(group: ProcessGroup) -> list[list[int]]:
    shards = SequenceShards([13], group, "contiguous").compressed(4)
    return [shards.positions().tolist(), list(shards.lengths)]


def test_a_key_belongs_to_the_rank_of_its_last_token() -> None:
    # Tokens 0..3, 3..6, 6..9, 9..13: one rank has the last token of no key.
    assert [keys for keys, _ in on_ranks(4, keys_of_ranks)] == [[], [0], [1], [2]]


def loss_of(
    functions: Any, x: dict[str, Tensor], ratio: int, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x[name].clone().requires_grad_() for name in ("query_index", "key_index", "weights")]
    loss = functions.lightning_indexer_kl_loss(
        None, None, *leaves, x["indices"], target=x["target"], cmp_ratio=ratio, **options
    )
    return loss.detach(), torch.autograd.grad(loss, leaves)


def with_a_target(group: ProcessGroup) -> None:
    lengths = [5, 0, 6, 29]
    ends = list(accumulate(lengths))
    for ratio, mode in ((4, 3), (4, 0), (1, 3)):
        of_keys = [length // ratio for length in lengths]
        shards = SequenceShards(lengths, group, "contiguous")
        keys = shards.compressed(ratio) if ratio > 1 else shards
        x = compressed_inputs(lengths, CSA, torch.float64)
        x["key_index"] = x["index_values"][: sum(of_keys), :INDEX_DIM].unsqueeze(1)
        packed = {"layout": "TND", "actual_seq_lengths_query": ends, "sparse_mode": mode}
        packed |= {"actual_seq_lengths_key": list(accumulate(of_keys))}
        generator = torch.Generator().manual_seed(2)
        with ops.limits(None):
            x["indices"], _ = ops.lightning_indexer(
                x["query_index"], x["key_index"], x["weights"], sparse_count=COUNT,
                cmp_ratio=ratio, **packed,
            )  # fmt: skip
            p = torch.rand(x["indices"].shape, generator=generator, dtype=torch.float64)
            x["target"] = p.masked_fill(x["indices"] < 0, 0) / COUNT
            weight = torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
            local = {name: shards.shard(y) for name, y in x.items() if name != "key_index"}
            local["key_index"] = keys.shard(x["key_index"])
            choices: list[dict[str, Any]] = [
                {}, {"reduction": "mean", "token_weight": weight}, {"normalize_target": True},
                {"normalizer": 7.0},
            ]  # fmt: skip
            for options in choices:
                loss, expected = loss_of(ops, x, ratio, **packed, **options)
                mine = {
                    k: shards.shard(y) if k == "token_weight" else y for k, y in options.items()
                }
                actual, found = loss_of(
                    distributed, local, ratio, shards=shards, sparse_mode=mode, **mine
                )
                assert loss.item() != 0
                torch.testing.assert_close(actual, loss, rtol=1e-13, atol=0)
                for shares, d, y in zip((shards, keys, shards), found, expected, strict=True):
                    assert relative_error(shares.unshard(d), y) <= 1e-13


@rank_counts(2, 4)
def test_loss_with_a_target(ranks: int) -> None:
    on_ranks(ranks, with_a_target)
