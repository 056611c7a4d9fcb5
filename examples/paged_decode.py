"""Decode text with a paged KV cache, several sequences of different lengths at a time.

    python examples/train_lightning_indexer.py    once: trains the model
    python examples/paged_decode.py

Each layer caches the latent, the rotary key and the indexer's key of every token in blocks of a
fixed size (ascend_attn_ops.PagedCache). A waiting prompt starts as soon as there are blocks for all
of its bytes, and frees them when it ends. The indexer and the attention read the blocks where they
are. Then everything is decoded again without a cache, and the bytes must match.

Then one sequence is decoded after longer and longer texts: with sparse attention, to the keys that
the indexer prefers, and with dense attention, to all of them.

At the end, held-out text is read byte by byte from pages of bfloat16 and of int8, to compare their
memory and their perplexity.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import torch
from ascend_attn_ops import LatentAttention
from npu import register_npu
from python_corpus import load_corpus, sample_windows
from sparse_lm import Block, ModelConfig, SparseLM
from torch import Tensor
from torch.nn import functional as F

ATTENTION = ("sparse", "dense")
SPEED_STEPS = 16
Attend = Callable[[int, LatentAttention, Tensor], Tensor]
"""The output of a layer, by its number, for hidden states (B, S, hidden_size)."""


def every_key(positions: Tensor) -> Tensor:
    """Selects all keys up to each position, padded with -1."""
    keys = torch.arange(int(positions.amax()) + 1, dtype=torch.int32, device=positions.device)
    return torch.where(keys <= positions[..., None], keys, -1).unsqueeze(-2)


def logits_of(model: SparseLM, text: Tensor, new: int, attend: Attend) -> Tensor:
    """Returns (B, new, 256), of text (B, S') of which the layers see the last `new` bytes."""
    x = model.embed(text)[:, -new:]
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x = x + attend(i, block.attention, block.attention_norm(x))
        x = x + block.mlp(x)
    return model.head(model.norm(x))


@dataclass
class Text:
    text: list[int]
    total: int  # bytes, when complete
    sequence: int = 0  # of the cache

    def complete(self) -> bool:
        return len(self.text) == self.total


class PagedDecoder:
    def __init__(
        self, model: SparseLM, config: ModelConfig, num_blocks: int, block_size: int,
        attention: str = "sparse", pages: str = "",
    ) -> None:  # fmt: skip
        self.model, self.attention = model, attention
        weight = model.head.weight
        sizes = {"latent": config.latent_dim, "rope": config.rope_dim, "index": config.index_dim}
        parts: dict[str, Any] = {name: (1, size) for name, size in sizes.items()}
        if pages == "int8":
            # 656 bytes: the latent, the rope in 16 bits, and a float32 scale for 128 numbers.
            row = config.latent_dim + 2 * config.rope_dim + 4 * -(-config.latent_dim // 128)
            parts = {
                "latent": (1, row, torch.int8),
                "index": (1, config.index_dim, torch.int8),
                "index_scale": (1, 1, torch.float16),
            }
        self.cache = ops.PagedCache(
            num_blocks, block_size, parts, layers=len(model.blocks), dtype=weight.dtype,
            device=weight.device,
        )  # fmt: skip
        self.running: list[Text] = []

    def decode(self, prompts: list[Text], progress: Progress) -> None:
        waiting = deque(prompts)
        while waiting or self.running:
            while waiting and self.admits(waiting[0]):
                text = waiting.popleft()
                self.running.append(text)
                self.step([text], new=len(text.text))
                progress.update(1, len(self.running), self.cache.free_blocks)
            if not self.running:
                raise SystemExit("--blocks: too few for the first sequence that waits")
            self.release_completed()
            if self.running:
                self.step(self.running, new=1)
                progress.update(len(self.running), len(self.running), self.cache.free_blocks)
            self.release_completed()

    def admits(self, text: Text) -> bool:
        """Takes all blocks that a text will need, if there are enough."""
        if self.cache.free_blocks < -(-text.total // self.cache.block_size):
            return False
        text.sequence = self.cache.add()
        self.cache.reserve({text.sequence: text.total})
        return True

    def release_completed(self) -> None:
        for text in self.running:
            if text.complete():
                self.cache.free(text.sequence)
        self.running = [text for text in self.running if not text.complete()]

    def step(self, batch: list[Text], new: int) -> None:
        """Write the last `new` bytes of each text to the cache and append the next byte."""
        # The embedding also reads a few bytes before the new ones; a whole text has none.
        seen = new + self.model.NEIGHBOURS - 1
        rows = torch.tensor([text.text[-seen:] for text in batch])
        chosen = self.logits([text.sequence for text in batch], rows, new)[:, -1].argmax(-1)
        for text, byte in zip(batch, chosen.tolist(), strict=True):
            text.text.append(byte)

    def logits(self, sequences: list[int], text: Tensor, new: int) -> Tensor:
        """Returns logits_of the last `new` bytes, after writing them to the cache."""
        step = self.cache.append(dict.fromkeys(sequences, new))

        def attend(layer: int, attention: LatentAttention, x: Tensor) -> Tensor:
            pages, indices = self.cache.layer(layer, step), None
            if self.attention == "dense":
                indices = every_key(step.positions)
            out, _ = attention(x.flatten(0, 1), step.positions, indices=indices, pages=pages)
            return out.view_as(x)

        return logits_of(self.model, text.to(self.model.head.weight.device), new, attend)


def decode_without_cache(
    model: SparseLM, prompts: list[Text], attention: str, progress: Progress
) -> None:
    def attend(_: int, layer: LatentAttention, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return layer(x, indices=every_key(positions) if attention == "dense" else None)[0]

    for sequence in prompts:
        while not sequence.complete():
            text = torch.tensor([sequence.text], device=model.head.weight.device)
            logits = logits_of(model, text, len(sequence.text), attend)
            sequence.text.append(int(logits[0, -1].argmax()))
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
        sequence = Text(text, length + SPEED_STEPS * (len(ATTENTION) + 1) + 1)
        blocks = -(-sequence.total // block_size)
        decoder = PagedDecoder(model, config, blocks, block_size)
        decoder.admits(sequence)
        decoder.step([sequence], new=length)
        print(f"{length:7}", end="", flush=True)
        for decoder.attention in ATTENTION:
            decoder.step([sequence], new=1)
            start = time.perf_counter()
            for _ in range(SPEED_STEPS):
                decoder.step([sequence], new=1)
            per_second = SPEED_STEPS / (time.perf_counter() - start)
            print(f"{per_second:8,.0f} tokens/s", end="", flush=True)
        print()


def print_perplexity(
    model: SparseLM, config: ModelConfig, text: Tensor, block_size: int, attention: str
) -> None:
    """Compare pages of bfloat16 and int8 on texts (B, S + 1), whose second half is decoded."""
    model, rows, length = model.bfloat16(), len(text), text.shape[1] - 1
    half = length // 2
    found = {}
    print(flush=True)
    for pages in ("bfloat16", "int8"):
        decoder = PagedDecoder(
            model, config, rows * -(-length // block_size), block_size, attention, pages
        )
        sequences = [decoder.cache.add() for _ in text]
        decoder.logits(sequences, text[:, :half], half)
        progress, loss = Progress(f"{pages} pages", rows * (length - half)), 0.0
        for end in range(half + 1, length + 1):
            seen = text[:, max(0, end - model.NEIGHBOURS) : end]
            logits = decoder.logits(sequences, seen, 1)[:, 0].float().cpu()
            loss += F.cross_entropy(logits, text[:, end], reduction="sum").item()
            progress.update(rows, rows, decoder.cache.free_blocks)
        layer = decoder.cache.pages[0]
        tokens = layer["latent"].shape[0] * block_size
        found[pages] = (
            sum(layer[name].nbytes for name in ("latent", "rope") if name in layer) // tokens,
            sum(layer[name].nbytes for name in ("index", "index_scale") if name in layer) // tokens,
            math.exp(loss / progress.done),
        )
    print("\nof a token in a layer:")
    print(f"{'pages':12}{'latent, bytes':>14}{'index, bytes':>14}{'perplexity':>14}")
    for pages, (latent, index, perplexity) in found.items():
        print(f"{pages:12}{latent:14,}{index:14,}{perplexity:14.4f}")
    ratios = [y / x for x, y in zip(*found.values(), strict=True)]
    print("{:12}{:13.2f}x{:13.2f}x{:13.4f}x".format("int8 has", *ratios))


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
        choices=ATTENTION,
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
    parser.add_argument(
        "--text",
        type=int,
        default=512,
        help="bytes of each held-out text whose perplexity is measured; 0: none",
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


def prompts_of(arguments: argparse.Namespace) -> list[Text]:
    """Return held-out prompts, each with its own length and number of bytes to decode."""
    _, held_out = load_corpus()
    count, longest = arguments.sequences, arguments.prompt
    windows = sample_windows(held_out, count, longest, arguments.seed).tolist()
    prompts = []
    for i, window in enumerate(windows):
        length = max(SparseLM.NEIGHBOURS, longest * (i + 1) // count)
        new = max(1, arguments.new * (count - i) // count)
        prompts.append(Text(window[:length], length + new))
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
    decoder = PagedDecoder(
        model, config, arguments.blocks, arguments.block_size, arguments.attention
    )
    with limits_of(arguments.device):
        decoder.decode(paged, Progress("paged cache", new))
        decode_without_cache(model, plain, arguments.attention, Progress("without cache", new))

    for sequence, start in zip(paged[:3], starts, strict=False):
        before, after = (
            bytes(part).decode(errors="replace")
            for part in (sequence.text[max(0, start - 40) : start], sequence.text[start:])
        )
        print(f"\n...{before!r}\n  -> {after!r}")
    different = sum(a.text != b.text for a, b in zip(paged, plain, strict=True))
    outcome = (
        f"\n{len(paged) - different} of {len(paged)} sequences equal decoding without a cache, "
        f"byte for byte; {decoder.cache.free_blocks} of {arguments.blocks} blocks are free again."
    )
    # In bfloat16, two bytes can score so close that the batch size decides between them.
    if (different and exact) or decoder.cache.free_blocks != arguments.blocks:
        raise SystemExit(outcome)
    print(outcome)
    with limits_of(arguments.device):
        print_speed(model, config, arguments.contexts, arguments.block_size, arguments.seed)
        if arguments.text:
            _, held_out = load_corpus()
            text = sample_windows(
                held_out, arguments.sequences, arguments.text + 1, arguments.seed + 1
            )
            print_perplexity(model, config, text, arguments.block_size, arguments.attention)


if __name__ == "__main__":
    main()
