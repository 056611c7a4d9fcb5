"""Decode text with a paged KV cache, several sequences of different lengths at a time.

    python examples/train_lightning_indexer.py    once: trains the model
    python examples/paged_decode.py

Each layer caches the latent, the rotary key and the indexer's key of every token in blocks of a
fixed size. A sequence takes a block when its last one is full and frees all of them when it ends; a
waiting prompt starts as soon as there are blocks for it. The indexer and the attention read the
blocks where they are. Then everything is decoded again without a cache, and the bytes must match.

At the end, one sequence is decoded after longer and longer texts: with sparse attention, to the
keys that the indexer prefers, and with dense attention, to all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import ascend_attn_ops as ops
import torch
from npu import register_npu
from python_corpus import load_corpus, sample_windows
from sparse_lm import AttentionInputs, Block, LatentAttention, ModelConfig, SparseLM
from torch import Tensor


class Keys(NamedTuple):
    """Keys to attend to: (B, S, 1, D) each, or caches (num_blocks, block_size, 1, D)."""

    latent: Tensor
    rope: Tensor
    indexer: Tensor
    # For caches, as arguments of the operators: PA_BSND, and the blocks of each sequence.
    layout: str | None = None
    block_table: Tensor | None = None


def new_keys(inputs: AttentionInputs) -> Keys:
    return Keys(inputs.latent, inputs.key_rope, inputs.projections.key_index)


class LayerCache:
    """The keys of one layer, in blocks (num_blocks, block_size, 1, D)."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, like: Tensor) -> None:
        sizes = (config.latent_dim, config.rope_dim, config.index_dim)
        shapes = [(num_blocks, block_size, 1, size) for size in sizes]
        latent, rope, indexer = (like.new_zeros(shape) for shape in shapes)
        self.keys = Keys(latent, rope, indexer)

    def write(self, keys: Keys, slots: Tensor) -> None:
        latent, rope, indexer = (key.flatten(0, 1) for key in keys[:3])
        # One call can write rows of different sizes: here latents as key and ropes as value.
        ops.scatter_pa_kv_cache_(latent, self.keys.latent, slots, rope, self.keys.rope)
        ops.scatter_pa_kv_cache_(indexer, self.keys.indexer, slots)

    def read(self, block_table: Tensor) -> Keys:
        """Copies nothing. Rows beyond the length of a sequence are never read."""
        return self.keys._replace(layout="PA_BSND", block_table=block_table)


KeysOfLayer = Callable[[int, AttentionInputs], Keys]
SPEED_STEPS = 16
Select = Callable[[LatentAttention, AttentionInputs, Keys, Tensor], Tensor]
"""Returns the keys that each query attends to, (B, S, 1, K) int32. The last argument has the number
of keys of each sequence."""


def select_by_indexer(
    layer: LatentAttention, inputs: AttentionInputs, keys: Keys, lengths: Tensor
) -> Tensor:
    projections = inputs.projections._replace(key_index=keys.indexer)
    return layer.indexer.select(
        projections, layer.top_k, actual_seq_lengths_key=lengths, layout_key=keys.layout,
        block_table=keys.block_table,
    )  # fmt: skip


def select_all(
    layer: LatentAttention, inputs: AttentionInputs, keys: Keys, lengths: Tensor
) -> Tensor:
    """The operator applies the causal mask, and passes over what a sequence does not have."""
    batch, tokens = inputs.query.shape[:2]
    count = int(lengths.amax())
    positions = torch.arange(count, dtype=torch.int32, device=lengths.device)
    return positions.expand(batch, tokens, 1, count)


ATTENTION: dict[str, Select] = {"sparse": select_by_indexer, "dense": select_all}


def next_bytes(
    model: SparseLM,
    text: Tensor,
    positions: Tensor,
    keys_of_layer: KeysOfLayer,
    select: Select,
) -> Tensor:
    """Predict the byte (B,) after text (B, S'), whose last S bytes are at positions (B, S)."""
    x = model.embed(text)[:, -positions.shape[1] :]
    lengths = (positions[:, -1] + 1).int()
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        layer = block.attention
        inputs = layer.project(block.attention_norm(x), positions)
        keys = keys_of_layer(i, inputs)
        x = x + attend(layer, inputs, keys, select(layer, inputs, keys, lengths), lengths)
        x = x + block.mlp(x)
    return model.head(model.norm(x[:, -1])).argmax(-1)


def attend(
    layer: LatentAttention, inputs: AttentionInputs, keys: Keys, indices: Tensor, lengths: Tensor
) -> Tensor:
    attended, *_ = ops.sparse_flash_attention(
        inputs.query, keys.latent, keys.latent, indices,
        scale_value=layer.scale, query_rope=inputs.query_rope, key_rope=keys.rope,
        actual_seq_lengths_key=lengths, layout_kv=keys.layout, block_table=keys.block_table,
    )  # fmt: skip
    values = torch.einsum("bsnl,nld->bsnd", attended, layer.absorbed_value)
    return layer.out(values.flatten(-2))


@dataclass
class Sequence:
    text: list[int]
    total: int  # bytes, when complete
    blocks: list[int] = field(default_factory=list)

    def complete(self) -> bool:
        return len(self.text) == self.total


class PagedDecoder:
    def __init__(
        self,
        model: SparseLM,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        select: Select = select_by_indexer,
    ):
        self.model, self.block_size, self.select = model, block_size, select
        weight = model.head.weight
        self.device = weight.device
        self.layers = [LayerCache(config, num_blocks, block_size, weight) for _ in model.blocks]
        self.free = list(range(num_blocks))
        self.running: list[Sequence] = []

    def decode(self, prompts: list[Sequence], progress: Progress) -> None:
        waiting = deque(prompts)
        while waiting or self.running:
            while waiting and self.has_room_for(waiting[0]):
                sequence = waiting.popleft()
                self.running.append(sequence)
                self.step([sequence], new=len(sequence.text))
                progress.update(1, len(self.running), len(self.free))
            if not self.running:
                raise SystemExit("--blocks: too few for the first sequence that waits")
            self.release_completed()
            if self.running:
                self.step(self.running, new=1)
                progress.update(len(self.running), len(self.running), len(self.free))
            self.release_completed()

    def has_room_for(self, sequence: Sequence) -> bool:
        """Return whether this sequence and all running ones can be completed."""
        missing = sum(self.blocks_of(other.total) - len(other.blocks) for other in self.running)
        return self.blocks_of(sequence.total) <= len(self.free) - missing

    def blocks_of(self, length: int) -> int:
        return -(-length // self.block_size)

    def release_completed(self) -> None:
        for sequence in self.running:
            if sequence.complete():
                self.free += sequence.blocks
                sequence.blocks = []
        self.running = [sequence for sequence in self.running if not sequence.complete()]

    def step(self, batch: list[Sequence], new: int) -> None:
        """Write the last `new` bytes of each sequence to the cache and append the next byte."""
        for sequence in batch:
            while len(sequence.blocks) < self.blocks_of(len(sequence.text)):
                sequence.blocks.append(self.free.pop())
        most = max(len(sequence.blocks) for sequence in batch)
        block_table = self.tensor(
            [sequence.blocks + [-1] * (most - len(sequence.blocks)) for sequence in batch]
        )
        positions = self.tensor(
            [list(range(len(sequence.text) - new, len(sequence.text))) for sequence in batch]
        )
        slots = ops.slot_mapping(block_table, positions, self.block_size).flatten()

        def through_cache(layer: int, inputs: AttentionInputs) -> Keys:
            self.layers[layer].write(new_keys(inputs), slots)
            return self.layers[layer].read(block_table)

        # The embedding also reads a few bytes before the new ones; a whole text has none.
        seen = new + self.model.NEIGHBOURS - 1
        text = self.tensor([sequence.text[-seen:] for sequence in batch])
        chosen = next_bytes(self.model, text.long(), positions, through_cache, self.select)
        for sequence, byte in zip(batch, chosen.tolist(), strict=True):
            sequence.text.append(byte)

    def tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.device)


def decode_without_cache(
    model: SparseLM, prompts: list[Sequence], select: Select, progress: Progress
) -> None:
    device = model.head.weight.device
    for sequence in prompts:
        while not sequence.complete():
            text = torch.tensor([sequence.text], device=device)
            positions = torch.arange(len(sequence.text), device=device)[None]
            byte = next_bytes(model, text, positions, lambda _, inputs: new_keys(inputs), select)
            sequence.text.append(int(byte))
            progress.update(1, 1)


def print_speed(
    model: SparseLM, config: ModelConfig, contexts: list[int], block_size: int, seed: int
) -> None:
    """Time a few tokens of one sequence after texts of these lengths."""
    if not contexts:
        return
    _, held_out = load_corpus()
    print(f"\n{'keys':>7}" + "".join(f"{name:>17}" for name in ATTENTION), flush=True)
    for length in contexts:
        text = sample_windows(held_out, 1, length, seed)[0, :length].tolist()
        sequence = Sequence(text, length + SPEED_STEPS * (len(ATTENTION) + 1) + 1)
        blocks = -(-sequence.total // block_size)
        decoder = PagedDecoder(model, config, blocks, block_size)
        decoder.step([sequence], new=length)
        print(f"{length:7}", end="", flush=True)
        for select in ATTENTION.values():
            decoder.select = select
            decoder.step([sequence], new=1)
            start = time.perf_counter()
            for _ in range(SPEED_STEPS):
                decoder.step([sequence], new=1)
            per_second = SPEED_STEPS / (time.perf_counter() - start)
            print(f"{per_second:8,.0f} tokens/s", end="", flush=True)
        print()


class Progress:
    """A bar redrawn in place on a terminal; one line at the end elsewhere."""

    WIDTH = 24

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0
        self.start = time.perf_counter()

    def update(self, tokens: int, running: int, free_blocks: int | None = None) -> None:
        self.done += tokens
        last = self.done == self.total
        if not (sys.stdout.isatty() or last):
            return
        speed = self.done / (time.perf_counter() - self.start)
        filled = self.WIDTH * self.done // self.total
        bar = "█" * filled + "░" * (self.WIDTH - filled)
        line = f"{bar} {self.name:<14} {self.done}/{self.total} bytes  {speed:,.0f} tokens/s"
        if not last:
            line += f"  {running} running"
            line += f", {free_blocks} blocks free" if free_blocks is not None else ""
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        print(clear + line, end="\n" if last else "", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("out/checkpoint.pt"),
        help="what train_lightning_indexer.py has written",
    )
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default: float32 on the CPU, bfloat16 on an NPU, whose kernels have no float32",
    )
    parser.add_argument(
        "--attention",
        choices=list(ATTENTION),
        default="sparse",
        help="to the keys that the indexer selects, or to all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="bytes of the longest prompt")
    parser.add_argument("--new", type=int, default=64, help="bytes to decode, at most")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="*",
        default=[1024, 4096, 16384],
        help="numbers of keys at which to time a token",
    )
    return parser.parse_args()


def load_model(path: Path, device: str, dtype: torch.dtype) -> tuple[SparseLM, ModelConfig]:
    if not path.exists():
        raise SystemExit(f"{path} is not there: run examples/train_lightning_indexer.py first")
    state = torch.load(path, map_location="cpu", weights_only=True)
    config = ModelConfig(**{name: state["recipe"][name] for name in asdict(ModelConfig())})
    model = SparseLM(config)
    model.load_state_dict(state["model"])
    return model.to(device, dtype).eval(), config


def prompts_of(arguments: argparse.Namespace) -> list[Sequence]:
    """Return held-out prompts, each with its own length and number of bytes to decode."""
    _, held_out = load_corpus()
    count, longest = arguments.sequences, arguments.prompt
    windows = sample_windows(held_out, count, longest, arguments.seed).tolist()
    prompts = []
    for i, window in enumerate(windows):
        length = max(SparseLM.NEIGHBOURS, longest * (i + 1) // count)
        new = max(1, arguments.new * (count - i) // count)
        prompts.append(Sequence(window[:length], length + new))
    return prompts


def limits_of(device: str) -> contextlib.AbstractContextManager[None]:
    """Laptop sizes are outside the NPU's limits."""
    return ops.limits(None) if device == "cpu" else contextlib.nullcontext()


@torch.no_grad()
def main() -> None:
    arguments = parse_arguments()
    if arguments.device == "npu":
        register_npu()
    exact = (arguments.dtype or {"cpu": "float32"}.get(arguments.device)) == "float32"
    dtype = torch.float32 if exact else torch.bfloat16
    model, config = load_model(arguments.checkpoint, arguments.device, dtype)
    paged, plain = prompts_of(arguments), prompts_of(arguments)
    new = sum(sequence.total - len(sequence.text) for sequence in paged)
    starts = [len(sequence.text) for sequence in paged]
    print(
        f"{len(paged)} prompts of {min(starts)} to {max(starts)} bytes; {arguments.blocks} blocks "
        f"of {arguments.block_size}; threads: {torch.get_num_threads()}",
        flush=True,
    )
    select = ATTENTION[arguments.attention]
    decoder = PagedDecoder(model, config, arguments.blocks, arguments.block_size, select)
    with limits_of(arguments.device):
        decoder.decode(paged, Progress("paged cache", new))
        decode_without_cache(model, plain, select, Progress("without cache", new))

    for sequence, start in zip(paged[:3], starts, strict=False):
        before, after = (
            bytes(part).decode(errors="replace")
            for part in (sequence.text[max(0, start - 40) : start], sequence.text[start:])
        )
        print(f"\n...{before!r}\n  -> {after!r}")
    different = sum(a.text != b.text for a, b in zip(paged, plain, strict=True))
    outcome = (
        f"\n{len(paged) - different} of {len(paged)} sequences equal decoding without a cache, "
        f"byte for byte; {len(decoder.free)} of {arguments.blocks} blocks are free again."
    )
    # In bfloat16, two bytes can score so close that the batch size decides between them.
    if (different and exact) or len(decoder.free) != arguments.blocks:
        raise SystemExit(outcome)
    print(outcome)
    with limits_of(arguments.device):
        print_speed(model, config, arguments.contexts, arguments.block_size, arguments.seed)


if __name__ == "__main__":
    main()
