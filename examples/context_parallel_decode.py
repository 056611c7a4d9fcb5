"""Decode with a paged cache that several ranks share: decode context parallelism.

    torchrun --nproc-per-node 2 examples/context_parallel_decode.py

Block j of a sequence is in the cache of rank j % ranks, so that a rank holds a part of the latents
and ropes. The keys of the indexer, which take a fifth of that memory, are on every rank. In each
step

1. every rank writes the new tokens whose blocks it has,
2. the indexer selects among all keys of a sequence, on every rank alike,
3. every rank attends to the selected keys that it has, with their softmax statistics,
4. the ranks exchange outputs and log-sum-exps, and merge them.

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

HEADS, LATENT, ROPE = 16, 512, 64
INDEX_HEADS, INDEX_SIZE, COUNT = 8, 128, 48  # of the indexer, and the keys that it selects
BLOCK, BLOCKS = 16, 64  # rows of a block, and blocks of a rank's cache
SCALE = 192**-0.5
# Outputs are rounded to bfloat16 before they are merged, and after it.
TOLERANCE = 2**-6


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

    def selection(self, indices: Tensor) -> Tensor:
        """The rank's own keys of a selection, in local positions, with -1 behind them."""
        mine = (indices >= 0) & self.has(indices)
        order = mine.int().argsort(dim=-1, descending=True, stable=True)
        return torch.where(mine, self.local(indices), -1).gather(-1, order)


@dataclass(frozen=True)
class Cache:
    """The latents and ropes of a part of the keys, in blocks (num_blocks, BLOCK, 1, size)."""

    part: Part
    latent: Tensor
    rope: Tensor
    block_table: Tensor  # (B, M): the blocks of each sequence

    @classmethod
    def empty(cls, part: Part, sequences: int, most: int, like: Tensor) -> Cache:
        """Blocks for `most` keys of each sequence; the cache has others for other sequences."""
        blocks = -(-most // (BLOCK * part.ranks))
        if sequences * blocks > BLOCKS:
            raise SystemExit(f"{sequences} sequences of {most} keys need more than {BLOCKS} blocks")
        table = torch.arange(sequences * blocks, dtype=torch.int32, device=like.device)
        latent, rope = (like.new_zeros(BLOCKS, BLOCK, 1, size) for size in (LATENT, ROPE))
        return cls(part, latent, rope, table.view(sequences, blocks))

    def write(self, latent: Tensor, rope: Tensor, positions: Tensor) -> None:
        """Write the keys of new tokens, (B * S, 1, size), at positions (B, S)."""
        local = torch.where(self.part.has(positions), self.part.local(positions), -1)
        slots = ops.slot_mapping(self.block_table, local, BLOCK).flatten()
        ops.scatter_pa_kv_cache_(latent, self.latent, slots, rope, self.rope)

    def attend(
        self, query: Tensor, query_rope: Tensor, indices: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to the selected keys of the part: out (B, S, N, D), and its log-sum-exp."""
        out, softmax_max, softmax_sum = ops.sparse_flash_attention(
            query, self.latent, self.latent, self.part.selection(indices),
            scale_value=SCALE, query_rope=query_rope, key_rope=self.rope,
            # The indexer has applied the causal mask, which a part of the keys does not show.
            sparse_mode=0, actual_seq_lengths_key=self.part.count(lengths),
            layout_key="PA_BSND", block_table=self.block_table, return_softmax_lse=True,
        )  # fmt: skip
        return out, ops.log_sum_exp(softmax_max, softmax_sum).squeeze(1)


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


def decode(part: Part, model: Model, prompts: list[int], steps: int) -> float:
    """Return the largest difference from one rank that has all keys, relative to max(1, |x|)."""
    batch, most = len(prompts), max(prompts) + steps
    probe = model.project(1, 1, 1)
    cache, whole = (Cache.empty(x, batch, most, probe) for x in (part, Part(0, 1)))
    index_keys = probe.new_zeros(whole.latent.shape[0], BLOCK, 1, INDEX_SIZE)
    lengths = torch.zeros(batch, dtype=torch.int32, device=probe.device)
    largest = 0.0
    for step in range(steps + 1):
        # The first step has the prompts, of which the shorter ones begin with padding.
        new = max(prompts) if step == 0 else 1
        added = torch.tensor(prompts, dtype=torch.int32, device=probe.device) if step == 0 else 1
        lengths = lengths + added
        positions = lengths[:, None] - new + torch.arange(new, device=probe.device)
        positions = torch.where(positions < 0, -1, positions)
        keys = [model.project(batch, new, 1, x) for x in (LATENT, ROPE, INDEX_SIZE)]
        latent, rope, index_key = (x.flatten(0, 1) for x in keys)
        for each in (cache, whole):
            each.write(latent, rope, positions)
        slots = ops.slot_mapping(whole.block_table, positions, BLOCK).flatten()
        ops.scatter_pa_kv_cache_(index_key, index_keys, slots)
        pages: dict[str, Any] = {
            "layout_key": "PA_BSND", "block_table": whole.block_table,
            "actual_seq_lengths_key": lengths.int(),
        }  # fmt: skip
        indices, _ = ops.lightning_indexer(
            model.project(batch, new, INDEX_HEADS, INDEX_SIZE), index_keys,
            model.project(batch, new, INDEX_HEADS), sparse_count=COUNT, **pages,
        )  # fmt: skip
        query = model.project(batch, new, HEADS, LATENT)
        query_rope = model.project(batch, new, HEADS, ROPE)
        out = merged(*cache.attend(query, query_rope, indices, lengths))
        expected, *_ = ops.sparse_flash_attention(
            query, whole.latent, whole.latent, indices, scale_value=SCALE, query_rope=query_rope,
            key_rope=whole.rope, **pages,
        )  # fmt: skip
        difference = (out.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
        largest = max(largest, float(difference.max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
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
    difference = decode(part, Model(arguments.seed, device), arguments.prompts, arguments.steps)
    worst = torch.tensor(difference, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    text = (
        f"{part.ranks} ranks, {arguments.steps} steps of {len(arguments.prompts)} sequences: the "
        f"largest difference from one rank is {worst.item():.1e}"
    )
    if not worst.item() <= TOLERANCE:
        raise SystemExit(f"{text}, more than {TOLERANCE:.1e}")
    if part.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
