"""Tensors that travel between the ranks, and when."""

from __future__ import annotations

import gc
from typing import Any

import ascend_attn_ops as ops
import compressed_layer
import pytest
import sparse_layer
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from compressed_layer import DIM, KINDS, LEFT
from sparse_layer import SCALE, Sizes, inputs, of_ranks
from support.processes import on_ranks, rank_counts
from torch import Tensor
from torch.distributed import ProcessGroup

debug = pytest.importorskip("torch.distributed.tensor.debug", reason="numpy is not installed")

GATHER = "all_gather_into_tensor"
# Latent, rope and indexer key as on the device: 1408 bytes per token in bfloat16.
SIZES = Sizes(heads=2, latent=512, rope=64, index_heads=2, index=128, count=16)


class Traffic(debug.CommDebugMode):
    """Also the bytes that a rank receives, or sends in all-to-alls, and the order of operators."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, 0
        self.received: dict[str, float] = {}
        self.order: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].removesuffix("_out")
        if name in (GATHER, "reduce_scatter_tensor"):
            share = args[0].nbytes * (1 if name.startswith("all") else 1 / self.ranks)
            self.received[name] = self.received.get(name, 0) + share * (self.ranks - 1)
        if name == "all_to_all_single":
            self.sent += args[0].nbytes
        self.order.append((name, tuple(args[0].shape) if isinstance(args[0], Tensor) else ()))
        return super().__torch_dispatch__(func, types, args, kwargs)


def layer(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> tuple[Tensor, Tensor]:
    found = sparse_layer.forward(x, distributed, SIZES, {"shards": shards}, **options)
    return found["out"], found["loss"]


def leaves(lengths: list[int], shards: SequenceShards) -> dict[str, Tensor]:
    tokens = inputs(lengths, torch.bfloat16, SIZES)
    return {name: shards.shard(x).requires_grad_() for name, x in tokens.items()}


def traffic(
    group: ProcessGroup, lengths: list[int], save_gathered: bool, autocast: bool = False
) -> list[dict[str, float]]:
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        x = leaves(lengths, shards)
        if autocast:
            x = {name: leaf.detach().float().requires_grad_() for name, leaf in x.items()}
        ranks = group.size()
        with Traffic(ranks) as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, loss = layer(x, shards, save_gathered=save_gathered)
        with Traffic(ranks) as backward:
            (out.sum() + loss).backward()
    return [forward.received, backward.received]


@rank_counts(2, 4)
@pytest.mark.parametrize("lengths", [[64], [40, 64, 24], [33, 2, 30]], ids=str)
def test_bytes_are_those_of_the_formula(ranks: int, lengths: list[int]) -> None:
    """Per token and (P - 1) / P of the tokens: 1408 forward, 1152 + 2816 for the gradients."""
    results = on_ranks(ranks, traffic, lengths, False)
    assert all(result == results[0] for result in results)
    forward, backward = results[0]
    tokens = sum(lengths) * (ranks - 1) / ranks
    # Padding adds at most two tokens to each rank's shard of each sequence.
    padding = 2 * len(lengths) * (ranks - 1) if any(n % (2 * ranks) for n in lengths) else 0
    gathered = forward[GATHER], backward[GATHER]
    # The forward of the loss computes the gradients, and sums that of the indexer's key.
    summed = forward["reduce_scatter_tensor"] + backward["reduce_scatter_tensor"]
    for received, per_token in zip((*gathered, summed), (1408, 1152, 2816), strict=True):
        assert tokens * per_token <= received <= (tokens + padding) * per_token


def test_keys_travel_in_the_dtype_of_autocast() -> None:
    plain, autocast = (on_ranks(2, traffic, [64], False, region)[0] for region in (False, True))
    assert plain == autocast


def test_gathered_keys_can_be_kept() -> None:
    for forward, backward in on_ranks(2, traffic, [64], True):
        assert forward[GATHER] == 32 * 1408
        assert backward == {"reduce_scatter_tensor": 32 * (576 * 4)}


def order_of_operators(group: ProcessGroup) -> None:
    with ops.limits(None), Traffic(group.size()) as seen:
        shards = SequenceShards([64], group)
        with torch.no_grad():
            layer(leaves([64], shards), shards)
    names = [name for name, _ in seen.order]
    gathers = [i for i, name in enumerate(names) if name == GATHER]
    first_wait = names.index("wait_tensor")
    # The calls before had no data: they checked the arguments.
    indexer = names.index("lightning_indexer", first_wait)
    assert [seen.order[i][1][-1] for i in gathers] == [128, 512, 64]
    assert max(gathers) < first_wait
    assert "reduce_scatter_tensor" not in names  # without gradients
    # The indexer waits for its own keys, the others are still on their way.
    assert names[:indexer].count("wait_tensor") == 1


def test_keys_travel_while_the_indexer_computes() -> None:
    on_ranks(2, order_of_operators)


def attend(x: dict[str, Tensor], shards: SequenceShards, key: Tensor) -> Tensor:
    indices = torch.zeros(shards.local_tokens, 1, SIZES.count, dtype=torch.int32)
    return distributed.sparse_flash_attention(
        x["query"], key, key, indices, scale_value=SCALE, shards=shards,
        query_rope=x["query_rope"], key_rope=x["key_rope"],
    )[0]  # fmt: skip


def kept_keys(group: ProcessGroup) -> None:
    """Keys are gathered as they are, however they were written, and stay so once prefetched."""
    with ops.limits(None), torch.no_grad():
        shards = SequenceShards([16], group)
        x = {name: value.detach().clone() for name, value in leaves([16], shards).items()}
        key, rope = x["latent"], x["key_rope"]
        seen = []
        for step in range(3):
            key.data.fill_(step + group.rank())
            seen.append(attend(x, shards, key))
            assert torch.equal(attend(x, shards, key.clone()), seen[-1])
        assert not torch.equal(seen[0], seen[1])
        ahead, x["key_rope"] = distributed.prefetch(key, rope, shards=shards)
        for tensor in (key, rope):
            tensor.data.zero_()  # as communication writes
        assert torch.equal(attend(x, shards, ahead), seen[2])
        with torch.inference_mode():
            (ahead,) = distributed.prefetch(key.clone(), shards=shards)
            assert not torch.equal(attend(x, shards, ahead), seen[2])
        ahead, x["key_rope"] = distributed.prefetch(key.float(), rope.float(), shards=shards)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match="prefetched in"),
        ):
            attend(x, shards, ahead)


@rank_counts(2, 1)
def test_kept_keys(ranks: int) -> None:
    on_ranks(ranks, kept_keys)


def balance(group: ProcessGroup, order: Any) -> int:
    shards = SequenceShards([8192], group, order)
    return int((shards.positions() + 1).sum())


def test_zigzag_balances_the_indexer() -> None:
    """The keys that the queries of a rank score."""
    assert len(set(on_ranks(4, balance, "zigzag"))) == 1
    quarters = [range(2048 * i + 1, 2048 * (i + 1) + 1) for i in range(4)]
    assert on_ranks(4, balance, "contiguous") == [sum(x) for x in quarters]


def roundtrip(group: ProcessGroup) -> None:
    for lengths in ([7, 0, 12], [1], [0], []):
        for order in ("zigzag", "contiguous"):
            shards = SequenceShards(lengths, group, order)  # type: ignore[arg-type]
            x = torch.arange(3 * shards.tokens, dtype=torch.float64).reshape(3, -1)
            local = shards.shard(x, dim=1).requires_grad_()
            whole = shards.unshard(local, dim=1)
            assert torch.equal(whole, x)
            assert local.shape[1] == shards.local_tokens
            (whole * whole.detach()).sum().backward()
            assert torch.equal(local.grad, group.size() * local)
            positions = torch.cat([torch.arange(n) for n in lengths] or [torch.empty(0).long()])
            assert torch.equal(shards.positions(), shards.shard(positions))
            counted = [p for part in shards.parts() for p in range(part.begin, part.end)]
            assert counted == shards.positions().tolist()


@rank_counts(4, 1, 2)
def test_unshard_is_the_inverse_of_shard(ranks: int) -> None:
    on_ranks(ranks, roundtrip)


def layer_without_tokens(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards([0, 0], group)
        results = of_ranks(
            inputs([0, 0], torch.float64, SIZES), shards, SIZES, loss={"reduction": "mean"}
        )
        assert results["loss"] == 0
        query = torch.zeros(0, 4, 8)
        for method in ("allgather", "ring", "ulysses"):
            out, *_ = distributed.flash_attention_score(
                query, query, query, num_heads=4, shards=shards, method=method
            )  # type: ignore[call-overload]
            assert out.shape == (0, 4, 8)


def test_no_tokens_at_all() -> None:
    on_ranks(2, layer_without_tokens)


def prefetched_in_vain(group: ProcessGroup) -> int:
    with ops.limits(None):
        shards = SequenceShards([64], group)
        x = leaves([64], shards)
        distributed.prefetch(x["latent"], x["key_rope"], shards=shards)
    gc.collect()
    return torch._C._distributed_c10d._get_work_registry_size()


def test_prefetched_keys_that_nothing_uses_are_freed() -> None:
    assert on_ranks(2, prefetched_in_vain) == [0, 0]


def traffic_of_windows(group: ProcessGroup, lengths: list[int], kind: str) -> list[tuple[int, int]]:
    with ops.limits(None):
        shards = SequenceShards(lengths, group, "contiguous")
        tokens = compressed_layer.inputs(lengths, KINDS[kind], torch.bfloat16)
        x = {name: shards.shard(tokens[name]).requires_grad_() for name in ("query", "ori_kv")}
        keys = shards.compressed(8).local_tokens
        cmp_kv = torch.ones(keys, 1, DIM, dtype=torch.bfloat16) if kind == "HCA" else None
        with Traffic(group.size()) as forward:
            out, _ = distributed.sparse_flash_mla(
                x["query"], x["ori_kv"], cmp_kv, shards=shards, scale_value=SCALE,
                cmp_ratio=8, ori_win_left=LEFT,
            )  # fmt: skip
        with Traffic(group.size()) as backward:
            out.sum().backward()
    gathers = [sum(x.startswith(GATHER) for x, _ in y.order) for y in (forward, backward)]
    sent = [x.sent // (2 * DIM) for x in (forward, backward)]
    return list(zip(sent, gathers, strict=True))


def test_a_rank_sends_the_tokens_in_the_windows_of_others() -> None:
    # Ranks of 20 tokens send the last 7, and in the backward the keys again, with gradients of
    # twice the size.
    assert on_ranks(3, traffic_of_windows, [60], "SWA") == [
        [(LEFT, 0), (LEFT, 0)], [(LEFT, 0), (3 * LEFT, 0)], [(0, 0), (2 * LEFT, 0)],
    ]  # fmt: skip
    # A rank of 3 tokens has windows of all ranks before.
    short = [x for x, _ in on_ranks(4, traffic_of_windows, [12], "HCA")]
    assert short == [(3 + 3 + 1, 1), (3 + 3, 1), (3, 1), (0, 1)]
    # Whole sequences on each rank.
    assert on_ranks(2, traffic_of_windows, [9, 9], "SWA") == [[(0, 0), (0, 0)]] * 2
