"""Decode with a paged cache that several ranks share: decode context parallelism.

    torchrun --nproc-per-node 2 examples/context_parallel_decode.py

Block j of a sequence is in the cache of rank j % ranks, so that a rank holds a part of the keys. In
each step

1. every rank writes the new tokens whose blocks it has,
2. every rank attends to the keys that it has, with their log-sum-exps,
3. the ranks exchange outputs and log-sum-exps, and merge them.

With sparse attention, the cache has latents and ropes. The keys of the indexer, which take a fifth
of that memory, are on every rank: it selects among all keys of a sequence, on every rank alike, and
the ranks attend to the selected keys. With dense attention, they attend to all keys before a query.

Every step is compared with the same step on one rank that has all keys.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import ascend_attn_ops as ops
import torch
import torch.distributed as dist
from npu import register_npu
from torch import Tensor

HEADS = 16  # of the queries
LATENT, ROPE = 512, 64  # sizes of the keys of sparse attention, which all heads share
KEY_HEADS, HEAD_SIZE = 2, 128  # of the keys and values of dense attention
INDEX_HEADS, INDEX_SIZE, COUNT = 8, 128, 48  # of the indexer, and the keys that it selects
BLOCK, BLOCKS = 16, 64  # rows of a block, and blocks of a rank's cache
SCALE = 192**-0.5
# Outputs are rounded to bfloat16 before they are merged, and after it.
TOLERANCE = 2**-6


Shapes = tuple[tuple[int, int], tuple[int, int]]
"""Heads and size of a key and of a value."""


@dataclass(frozen=True)
class Part:
    """The keys of a rank: the blocks j of a sequence with j % ranks == rank."""

    rank: int
    ranks: int

    def has(self, positions: Tensor) -> Tensor:
        return positions // BLOCK % self.ranks == self.rank

    def local(self, positions: Tensor) -> Tensor:
        """The positions of a rank's own keys among these keys alone."""
        return positions // (BLOCK * self.ranks) * BLOCK + positions % BLOCK

    def count(self, lengths: Tensor) -> Tensor:
        """How many of the first `lengths` keys the rank has."""
        period = BLOCK * self.ranks
        rest = (lengths % period - self.rank * BLOCK).clamp(0, BLOCK)
        return lengths // period * BLOCK + rest

    def position(self, local: Tensor) -> Tensor:
        """The inverse of `local`."""
        return (local // BLOCK * self.ranks + self.rank) * BLOCK + local % BLOCK

    def selection(self, indices: Tensor) -> Tensor:
        """The rank's own keys of a selection, in local positions, with -1 behind them."""
        mine = (indices >= 0) & self.has(indices)
        order = mine.int().argsort(dim=-1, descending=True, stable=True)
        return torch.where(mine, self.local(indices), -1).gather(-1, order)


@dataclass(frozen=True)
class Cache:
    """A part of the keys in blocks (num_blocks, BLOCK, heads, size): latents and ropes of sparse
    attention, or keys and values of dense attention."""

    part: Part
    key: Tensor
    value: Tensor
    block_table: Tensor  # (B, M): the blocks of each sequence

    @classmethod
    def empty(cls, part: Part, sequences: int, most: int, shapes: Shapes, like: Tensor) -> Cache:
        """Blocks for `most` keys of each sequence; the cache has others for other sequences."""
        blocks = -(-most // (BLOCK * part.ranks))
        if sequences * blocks > BLOCKS:
            raise SystemExit(f"{sequences} sequences of {most} keys need more than {BLOCKS} blocks")
        table = torch.arange(sequences * blocks, dtype=torch.int32, device=like.device)
        key, value = (like.new_zeros(BLOCKS, BLOCK, *shape) for shape in shapes)
        return cls(part, key, value, table.view(sequences, blocks))

    def write(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Write the keys of new tokens, (B, S, heads, size), at positions (B, S)."""
        local = torch.where(self.part.has(positions), self.part.local(positions), -1)
        slots = ops.slot_mapping(self.block_table, local, BLOCK).flatten()
        ops.scatter_pa_kv_cache_(
            key.flatten(0, 1), self.key, slots, value.flatten(0, 1), self.value
        )


def attend_to_selection(
    cache: Cache, query: Tensor, query_rope: Tensor, indices: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to the selected keys of the part: out (B, S, N, D), and its log-sum-exp (B, S, N)."""
    out, softmax_max, softmax_sum = ops.sparse_flash_attention(
        query, cache.key, cache.key, cache.part.selection(indices),
        scale_value=SCALE, query_rope=query_rope, key_rope=cache.value,
        # The indexer has applied the causal mask, which a part of the keys does not show.
        sparse_mode=0, actual_seq_lengths_key=cache.part.count(lengths),
        layout_kv="PA_BSND", block_table=cache.block_table, return_softmax_lse=True,
    )  # fmt: skip
    return out, ops.log_sum_exp(softmax_max, softmax_sum).squeeze(1)


def attend_to_all(
    cache: Cache, query: Tensor, positions: Tensor, lengths: Tensor, **causal: Any
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of the part up to each query: out (B, S, N, D), and its log-sum-exp."""
    if not causal and query.shape[1] > 1:
        # The causal mask between positions, of which a part of the keys has gaps.
        room = cache.block_table.shape[1] * BLOCK
        keys = cache.part.position(torch.arange(room, device=positions.device))
        causal = {"atten_mask": keys > positions[..., None], "sparse_mode": 1}
    out, lse = ops.fused_infer_attention_score(
        query, cache.key.flatten(2), cache.value.flatten(2), num_heads=HEADS,
        num_key_value_heads=KEY_HEADS, layout="BSND", block_table=cache.block_table,
        actual_seq_lengths_key=cache.part.count(lengths), return_softmax_lse=True, **causal,
    )  # fmt: skip
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


def merged(out: Tensor, lse: Tensor) -> Tensor:
    """Merge the outputs of all ranks over disjoint keys. A row without keys has an lse of -inf."""
    outs, lses = ([torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (out, lse))
    dist.all_gather(outs, out)
    dist.all_gather(lses, lse)
    whole, _ = ops.attention_update(lses, outs)
    return whole


class Model:
    """The projections of a layer, here random numbers: the same on all ranks."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def project(self, batch: int, tokens: int, *shape: int) -> Tensor:
        x = torch.randn(batch, tokens, *shape, generator=self.generator)
        return x.to(self.device, torch.bfloat16)


@dataclass(frozen=True)
class Step:
    """New tokens at positions (B, S), -1 for padding, of sequences with `lengths` keys."""

    positions: Tensor
    lengths: Tensor


class Attention:
    """The attention of a layer, whose keys and values have the given shapes."""

    shapes: Shapes

    def __init__(self, model: Model, whole: Cache) -> None:
        self.model, self.whole = model, whole

    def attend(self, cache: Cache, step: Step) -> tuple[Tensor, Tensor]:
        """Return the output merged over the ranks, and that of one rank with all keys."""
        raise NotImplementedError


class Sparse(Attention):
    """To the keys that an indexer selects."""

    shapes = ((1, LATENT), (1, ROPE))

    def __init__(self, model: Model, whole: Cache) -> None:
        super().__init__(model, whole)
        self.index_keys = whole.key.new_zeros(BLOCKS, BLOCK, 1, INDEX_SIZE)

    def attend(self, cache: Cache, step: Step) -> tuple[Tensor, Tensor]:
        batch, new = step.positions.shape
        slots = ops.slot_mapping(self.whole.block_table, step.positions, BLOCK).flatten()
        index_key = self.model.project(batch, new, 1, INDEX_SIZE)
        ops.scatter_pa_kv_cache_(index_key.flatten(0, 1), self.index_keys, slots)
        pages: dict[str, Any] = {
            "block_table": self.whole.block_table, "actual_seq_lengths_key": step.lengths,
        }  # fmt: skip
        indices, _ = ops.lightning_indexer(
            self.model.project(batch, new, INDEX_HEADS, INDEX_SIZE), self.index_keys,
            self.model.project(batch, new, INDEX_HEADS), sparse_count=COUNT,
            layout_key="PA_BSND", **pages,
        )  # fmt: skip
        query = self.model.project(batch, new, HEADS, LATENT)
        query_rope = self.model.project(batch, new, HEADS, ROPE)
        out = merged(*attend_to_selection(cache, query, query_rope, indices, step.lengths))
        expected, *_ = ops.sparse_flash_attention(
            query, self.whole.key, self.whole.key, indices, scale_value=SCALE,
            query_rope=query_rope, key_rope=self.whole.value, layout_kv="PA_BSND", **pages,
        )  # fmt: skip
        return out, expected


class Dense(Attention):
    """To all keys before a query, with grouped heads."""

    shapes = ((KEY_HEADS, HEAD_SIZE), (KEY_HEADS, HEAD_SIZE))

    def attend(self, cache: Cache, step: Step) -> tuple[Tensor, Tensor]:
        query = self.model.project(*step.positions.shape, HEADS, HEAD_SIZE)
        tokens = step.positions, step.lengths
        expected, _ = attend_to_all(self.whole, query, *tokens, sparse_mode=3)
        return merged(*attend_to_all(cache, query, *tokens)), expected


ATTENTION: dict[str, type[Attention]] = {"sparse": Sparse, "dense": Dense}


def decode(part: Part, name: str, model: Model, prompts: list[int], steps: int) -> float:
    """Return the largest difference from one rank that has all keys, relative to max(1, |x|)."""
    batch, most = len(prompts), max(prompts) + steps
    probe, shapes = model.project(1, 1, 1), ATTENTION[name].shapes
    cache, whole = (Cache.empty(x, batch, most, shapes, probe) for x in (part, Part(0, 1)))
    attention = ATTENTION[name](model, whole)
    lengths = torch.zeros(batch, dtype=torch.int32, device=probe.device)
    largest = 0.0
    for step in range(steps + 1):
        # The first step has the prompts, of which the shorter ones begin with padding.
        new = max(prompts) if step == 0 else 1
        added = torch.tensor(prompts, dtype=torch.int32, device=probe.device) if step == 0 else 1
        lengths = lengths + added
        positions = lengths[:, None] - new + torch.arange(new, device=probe.device)
        positions = torch.where(positions < 0, -1, positions)
        key, value = (model.project(batch, new, *shape) for shape in shapes)
        for each in (cache, whole):
            each.write(key, value, positions)
        out, expected = attention.attend(cache, Step(positions, lengths.int()))
        difference = (out.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
        largest = max(largest, float(difference.max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--attention", choices=list(ATTENTION), default="sparse")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, nargs="+", default=[70, 33, 5], help="tokens")
    parser.add_argument("--steps", type=int, default=8, help="tokens to decode")
    arguments = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    device = arguments.device
    if device == "npu":
        register_npu()
        torch.get_device_module(device).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl" if device == "npu" else "gloo")
    part = Part(dist.get_rank(), dist.get_world_size())
    model = Model(arguments.seed, device)
    difference = decode(part, arguments.attention, model, arguments.prompts, arguments.steps)
    worst = torch.tensor(difference, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    text = (
        f"{part.ranks} ranks, {arguments.attention} attention, {arguments.steps} steps of "
        f"{len(arguments.prompts)} sequences: the largest difference from one rank is "
        f"{worst.item():.1e}"
    )
    if not worst.item() <= TOLERANCE:
        raise SystemExit(f"{text}, more than {TOLERANCE:.1e}")
    if part.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
