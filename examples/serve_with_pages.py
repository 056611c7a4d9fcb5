"""Serve a transformers model with continuous batching on a paged KV cache.

    python examples/serve_with_pages.py

Requests arrive and end at different times and share one cache. Each step of the loop is one forward
of the model over new tokens of the running requests, packed one after another: one token of every
request that decodes, and chunks of prompts, as many as the token budget has room for. In each
layer, a PagedCache writes the new keys and values to the pages of their requests, and
fused_infer_attention_score reads the pages where they are. Then model.generate() decodes every
request alone, and the tokens must be equal.

The model is a small Llama with random weights. `--plot FILE` measures and draws the speed over the
number of requests that run at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import torch
import transformers
from npu import register_npu
from torch import Tensor

Model = Any
"""transformers.LlamaForCausalLM, whose annotations are incomplete."""
SIZES = (1, 2, 4, 8, 16)  # requests at a time, for the speed


def attend_to_pages(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *,
    pages_of: Callable[[int], Any], scaling: float, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention implementation of transformers, for tensors (1, heads, T, D)."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    pages = pages_of(module.layer_idx)
    pages.write(key=key, value=value)
    out, _ = ops.fused_infer_attention_score(
        query, pages.dense("key"), pages.dense("value"), num_key_value_heads=key.shape[1],
        sparse_mode=3, scale_value=scaling, **pages.step.options,
    )  # fmt: skip
    return out.unsqueeze(0), None


transformers.AttentionInterface.register("pages", attend_to_pages)


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new: int  # tokens to generate
    arrival: int = 0  # the step
    generated: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the cache
    sequence: int = 0  # of the cache

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    def pending(self) -> int:
        """Tokens that the model has not seen: 1 while decoding, more of a prompt."""
        return len(self.tokens) - self.cached


class Server:
    """Runs up to `batch` requests at a time, with up to `budget` tokens in a step."""

    def __init__(self, model: Model, blocks: int, block_size: int, budget: int, batch: int) -> None:
        self.model, self.budget, self.batch = model, budget, batch
        row = (model.config.num_key_value_heads, model.config.head_dim)
        self.cache = ops.PagedCache(
            blocks, block_size, {"key": row, "value": row}, dtype=model.dtype,
            layers=model.config.num_hidden_layers, device=model.device,
        )  # fmt: skip
        self.running: list[Request] = []

    def serve(self, requests: Iterable[Request], report: bool = False) -> None:
        waiting, step = deque(sorted(requests, key=lambda request: request.arrival)), 0
        while waiting or self.running:
            while waiting and waiting[0].arrival <= step and self.admits(waiting[0]):
                self.running.append(waiting.popleft())
            if self.running:
                self.step()
            elif waiting[0].arrival <= step:
                raise SystemExit("--blocks: too few for the first request that waits")
            for request in [x for x in self.running if len(x.generated) == x.new]:
                self.running.remove(request)
                self.cache.free(request.sequence)
                if report:
                    print(
                        f"step {step:3}: {request.new:2} tokens after {len(request.prompt):3}; "
                        f"{len(self.running)} running, {self.cache.free_blocks:2} blocks free",
                        flush=True,
                    )  # fmt: skip
            step += 1

    def admits(self, request: Request) -> bool:
        """Takes all blocks that a request will need, if there are enough."""
        length = len(request.prompt) + request.new
        room = self.cache.free_blocks * self.cache.block_size
        if len(self.running) == self.batch or length > room:
            return False
        request.sequence = self.cache.add()
        self.cache.reserve({request.sequence: length})
        return True

    def step(self) -> None:
        """Feed pending tokens to the model: all that decode, and what the budget has room for."""
        chunks: list[tuple[Request, int]] = []
        budget = self.budget
        for request in sorted(self.running, key=lambda request: request.pending() > 1):
            count = min(request.pending(), budget)
            if count:
                chunks.append((request, count))
                budget -= count
        step = self.cache.append({request.sequence: count for request, count in chunks})
        tokens: list[int] = []
        for request, count in chunks:
            tokens += request.tokens[request.cached :][:count]
            request.cached += count
        logits = self.model(
            torch.tensor([tokens], device=self.model.device), position_ids=step.positions[None],
            use_cache=False, logits_to_keep=torch.tensor(step.query_ends) - 1,
            pages_of=partial(self.cache.layer, step=step),
        ).logits  # fmt: skip
        for (request, _), token in zip(chunks, logits[0].argmax(-1).tolist(), strict=True):
            if request.pending() == 0:  # else a part of its prompt, whose prediction is known
                request.generated.append(token)


def generate(model: Model, request: Request) -> Any:
    """The tokens of model.generate() without sampling."""
    text = torch.tensor([request.prompt], device=model.device)
    options = {"attention_mask": torch.ones_like(text), "max_new_tokens": request.new}
    return model.generate(text, do_sample=False, **options)[0].tolist()


def make_model(device: str, dtype: torch.dtype) -> Model:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=256**-0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device, dtype).eval()


def random_requests(count: int, prompt: int, new: int, every: int) -> list[Request]:
    """One every few steps, with shorter and shorter prompts and more and more new tokens."""
    lengths = [max(1, prompt * (count - i) // count) for i in range(count)]
    tokens = [torch.randint(512, (length,)).tolist() for length in lengths]
    return [Request(x, max(1, new * (i + 1) // count), i * every) for i, x in enumerate(tokens)]


def measure(model: Model, new: int, block_size: int, budget: int) -> dict[int, float]:
    """Tokens per second over the requests that run at a time, of 16 equal ones; 0: generate().

    Each is the best of three rounds, as other processes slow a round down.
    """
    speed = dict.fromkeys((0, *SIZES), 0.0)
    for batch in 3 * list(speed):
        requests = [Request(torch.randint(512, (64,)).tolist(), new) for _ in range(max(SIZES))]
        model.set_attn_implementation("pages" if batch else "eager")
        blocks = batch * -(-(64 + new) // block_size)
        server = Server(model, blocks, block_size, budget, batch) if batch else None
        start = time.perf_counter()
        if server:
            server.serve(requests)
        else:
            for request in requests:
                generate(model, request)
        found = new * len(requests) / (time.perf_counter() - start)
        speed[batch] = max(speed[batch], found)
    for batch, best in speed.items():
        name = f"{batch:3} at a time" if batch else "generate()"
        print(f"{name:14}{best:7,.0f} tokens/s")
    return speed


def plot(speed: dict[int, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4))
    ours = [speed[batch] for batch in SIZES]
    axes.plot(SIZES, ours, "o-", color="#c8552b", label="continuous batching")
    axes.axhline(speed[0], color="#333333", linestyle="--", label="generate(), one at a time")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(batch) for batch in SIZES])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("generated tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate, at most")
    parser.add_argument("--every", type=int, default=4, help="steps between two arrivals")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time, at most")
    parser.add_argument("--budget", type=int, default=96, help="tokens in a step, at most")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure and draw the speed")
    own = parser.parse_args()
    if own.budget < own.batch:
        parser.error("--budget: expected a token for each of --batch requests, or more")
    if own.device == "npu":
        register_npu()
    torch.manual_seed(own.seed)
    # No NPU kernel computes in float32, and the CPU does so without the NPU's limits only.
    dtype = torch.float32 if own.device == "cpu" else torch.bfloat16
    model = make_model(own.device, dtype)
    requests = random_requests(own.requests, own.prompt, own.new, own.every)
    with ops.limits(None) if own.device == "cpu" else contextlib.nullcontext():
        model.set_attn_implementation("pages")
        server = Server(model, own.blocks, own.block_size, own.budget, own.batch)
        server.serve(requests, report=True)
        model.set_attn_implementation("eager")
        equal = sum(request.tokens == generate(model, request) for request in requests)
        outcome = f"{equal} of {len(requests)} requests have the tokens of generate()"
        # In bfloat16, two tokens can score so close that the batch decides between them.
        if equal < len(requests) and dtype == torch.float32:
            raise SystemExit(outcome)
        print(outcome, flush=True)
        if own.plot:
            plot(measure(model, own.new, own.block_size, own.budget), own.plot)


if __name__ == "__main__":
    main()
