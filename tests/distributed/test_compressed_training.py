"""DeepSeek-V4's attention on several ranks with what a training step has, and what travels."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from compressed_layer import (
    COUNT,
    CSA,
    DIM,
    INDEX_DIM,
    KINDS,
    LEFT,
    SCALE,
    forward,
    inputs,
    leaves_of,
    of_a_rank,
)
from support.processes import on_ranks, rank_counts
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

debug = pytest.importorskip("torch.distributed.tensor.debug", reason="numpy is not installed")

LENGTHS = [19, 6, 40]


def local_leaves(
    shards: SequenceShards, dtype: torch.dtype = torch.float64, kind: Any = CSA
) -> dict[str, Tensor]:
    tokens = inputs(list(shards.lengths), kind, dtype)
    return leaves_of({name: shards.shard(x) for name, x in tokens.items()}, kind)


def layer(shards: SequenceShards, x: dict[str, Tensor], kind: Any = CSA, **options: Any) -> Tensor:
    """A loss with a gradient of every input."""
    return forward(x, of_a_rank(shards, **options), kind)["out"].sin().sum()


def gradients(x: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert x.any() or not x.numel(), name
        assert torch.equal(actual[name], x), name


def in_a_step(group: ProcessGroup) -> None:
    """Compiled, recomputed, and with gathered keys that are kept: bit for bit as without."""
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group, "contiguous")
        x = local_leaves(shards)
        expected = layer(shards, x)
        wanted = gradients(x, expected)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        losses = {
            "kept": layer(shards, x, save_gathered=True),
            "recomputed": checkpoint(layer, shards, x, use_reentrant=False),
            "compiled": compiled(shards, x),
        }
        for loss in losses.values():
            assert torch.equal(loss, expected)
            same(gradients(x, loss), wanted)


@pytest.mark.smoke
@rank_counts(2, 3)
def test_compiled_and_recomputed(ranks: int) -> None:
    on_ranks(ranks, in_a_step)


def compiled_at_once(group: ProcessGroup) -> str:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        torch._dynamo.reset()
        step = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=r"call shards\.compressed") as caught:
            step(shards, local_leaves(shards))
    return str(caught.value)


def test_compiled_code_wants_its_shards_of_compressed_keys_before() -> None:
    for text in on_ranks(2, compiled_at_once):
        assert "call shards.compressed(4) before the compiled code" in text


def in_autocast(group: ProcessGroup) -> None:
    """As with arguments in bfloat16; sinks and the indexer's weights stay in float32."""
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards, torch.float32)
        keys = shards.compressed(CSA.ratio).local_tokens
        x["cmp_kv"] = torch.linspace(-1, 1, keys * DIM).reshape(keys, 1, DIM)
        x["key_index"] = torch.linspace(-1, 1, keys * INDEX_DIM).reshape(keys, 1, INDEX_DIM)
        keeps = ("sink", "weights")
        half = {name: leaf if name in keeps else leaf.bfloat16() for name, leaf in x.items()}
        expected = attention(shards, half)
        with torch.autocast("cpu", torch.bfloat16):
            actual = attention(shards, x)
        for out, y in zip(actual, expected, strict=True):
            assert out.dtype == y.dtype
            assert torch.equal(out, y)
        learned = "query", "ori_kv", "query_index", "weights", "sink"
        leaves = [x[name] for name in learned]
        found, wanted = (torch.autograd.grad(y[0].sum(), leaves) for y in (actual, expected))
        for name, d, y in zip(learned, found, wanted, strict=True):
            assert d.dtype == torch.float32
            assert torch.equal(d, y), name


def attention(shards: SequenceShards, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    indexer = x["query_index"], x["key_index"], x["weights"]
    indices, values = distributed.lightning_indexer(
        *(y.detach() for y in indexer), shards=shards, sparse_count=COUNT, cmp_ratio=CSA.ratio,
        return_values=True,
    )  # fmt: skip
    out = distributed.sparse_flash_mla_with_indexer_loss(
        x["query"], x["ori_kv"], x["cmp_kv"], indices, *indexer, shards=shards, scale_value=SCALE,
        sink=x["sink"], cmp_ratio=CSA.ratio, ori_win_left=LEFT,
    )  # fmt: skip
    return out, indices, values


def test_autocast() -> None:
    on_ranks(2, in_autocast)


class Traffic(debug.CommDebugMode):
    """The bytes that this rank sends to others in all-to-alls, and gathers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.sent, self.gathers = rank, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "all_to_all_single":
            self.sent += args[0].nbytes
        self.gathers += name.startswith("all_gather_into_tensor")
        return super().__torch_dispatch__(func, types, args, kwargs)


def traffic(group: ProcessGroup, lengths: list[int], kind: str) -> list[tuple[int, int]]:
    with ops.limits(None):
        shards = SequenceShards(lengths, group, "contiguous")
        x = local_leaves(shards, torch.bfloat16, KINDS[kind])
        keys = shards.compressed(8).local_tokens
        cmp_kv = torch.ones(keys, 1, DIM, dtype=torch.bfloat16) if kind == "HCA" else None
        with Traffic(group.rank()) as forward_pass:
            out, _ = distributed.sparse_flash_mla(
                x["query"], x["ori_kv"], cmp_kv, shards=shards, scale_value=SCALE,
                cmp_ratio=8, ori_win_left=LEFT,
            )  # fmt: skip
        with Traffic(group.rank()) as backward_pass:
            out.sum().backward()
    return [(x.sent // (2 * DIM), x.gathers) for x in (forward_pass, backward_pass)]


def test_a_rank_sends_the_tokens_in_the_windows_of_others() -> None:
    # Ranks of 20 tokens send the last 7, and in the backward the keys again, with gradients of
    # twice the size.
    assert on_ranks(3, traffic, [60], "SWA") == [
        [(LEFT, 0), (LEFT, 0)], [(LEFT, 0), (3 * LEFT, 0)], [(0, 0), (2 * LEFT, 0)],
    ]  # fmt: skip
    # A rank of 3 tokens has windows of all ranks before.
    assert [x[0] for x, _ in on_ranks(4, traffic, [12], "HCA")] == [3 + 3 + 1, 3 + 3, 3, 0]
    assert all(x[1] == 1 for x, _ in on_ranks(4, traffic, [12], "HCA"))
    # Whole sequences on each rank.
    assert on_ranks(2, traffic, [9, 9], "SWA") == [[(0, 0), (0, 0)]] * 2
