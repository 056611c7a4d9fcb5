"""A training step of the example's model: sparse, dense and eager, at growing sequence length.

    python benchmarks/training_step.py [--tokens 1024 4096] [--selected 512]

One layer of examples/sparse_lm.py, forward and backward, with the loss of the language model and
that of the indexer, under autocast to bfloat16:

    sparse  the operators over the K keys that the indexer selects
    dense   the operators over all keys, as in the warm-up of the indexer
    eager   what sparse computes, in plain torch with all pairs of tokens in memory

Time is measured in turn, the peak memory that a step adds in a process of its own. The share is
that of the time inside the operators of this library.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ascend_attn_ops.nn.latent_attention import LatentAttention, LatentInputs
from harness import Benchmark, Call, extra_memory, interleaved
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from sparse_lm import (
    Block,
    ModelConfig,
    Select,
    SparseLM,
    select_all,
    select_by_indexer,
)

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
WAYS = {"sparse": "ours, sparse", "dense": "ours, dense", "eager": "eager"}
# The scores of 8192 tokens and 8 heads would be 2.1 GB in float32, and autograd keeps several
# tensors of that size.
LONGEST_EAGER = 4096
# The kernel clamps here too, so that logarithms stay finite.
SMALLEST_PROBABILITY = 1e-8


class EagerAttention(LatentAttention):
    """The layer in plain torch: masks what is not selected, and leaves gradients to autograd."""

    def attend(self, inputs: LatentInputs, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        query, query_rope, latent, key_rope, projections = inputs
        assert projections is not None
        tokens = query.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        query_index, key_index, weights = projections
        logits = torch.einsum("bshd,btd->bhst", query_index, key_index.squeeze(2)).relu()
        index_scores = torch.einsum("bhst,bsh->bst", logits, weights).float()
        index_scores = index_scores.masked_fill(~causal, -torch.inf)
        best = index_scores.detach().topk(min(self.top_k, tokens)).indices
        kept = torch.zeros_like(index_scores, dtype=torch.bool).scatter_(2, best, True) & causal

        queries = torch.cat((query, query_rope), -1).transpose(1, 2)
        keys = torch.cat((latent, key_rope), -1).transpose(1, 2)
        scores = (queries @ keys.mT).float() * self.scale
        attention = scores.masked_fill(~kept[:, None], -torch.inf).softmax(-1)
        attended = attention.to(latent.dtype) @ latent.transpose(1, 2)

        # The attention is a fixed target.
        p = attention.detach().mean(1).clamp(min=SMALLEST_PROBABILITY)
        log_y = index_scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
        terms = p * (p.log() - log_y.clamp(min=torch.tensor(SMALLEST_PROBABILITY).log().item()))
        kl_loss = torch.where(kept, terms, 0).sum() / kept.shape[:2].numel()
        values = torch.einsum("bnsl,nld->bsnd", attended, self.absorbed_value)
        return self.out(values.flatten(-2)), kl_loss


def model_of(way: str, config: ModelConfig) -> tuple[SparseLM, Select]:
    """Return a model, with the same parameters for every way, and its selection of keys."""
    torch.manual_seed(0)
    model = SparseLM(config)
    if way == "eager":
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention.__class__ = EagerAttention
        # The layer selects by itself.
        return model, lambda *_: torch.empty(0)
    return model, select_all if way == "dense" else select_by_indexer


def training_step(way: str, tokens: int, selected: int) -> Call:
    """Make a model and return its training step."""
    config = ModelConfig(layers=1, top_k=selected)
    model, select = model_of(way, config)
    text = torch.randint(config.vocabulary, (1, tokens + 1))

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            lm_loss, kl_loss = model(text, select)
        (lm_loss + kl_loss).backward()

    return step


def warm_up(way: str, selected: int) -> None:
    """Load libraries and generate code, with a step over few tokens."""
    training_step(way, 256, selected)()


def first_step(way: str, tokens: int, selected: int) -> Call:
    """Prepare a step in a fresh process, and return the call to measure."""
    warm_up(way, selected)
    return training_step(way, tokens, selected)


class OperatorTime(TorchDispatchMode):
    """Adds up the seconds inside the operators of this library, which return when they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func.namespace == "ascend":
            self.seconds += time.perf_counter() - start
        return result


def share_of_operators(step: Call) -> float:
    """Return which part of a step's time is spent inside the operators of this library."""
    start = time.perf_counter()
    with OperatorTime() as inside:
        step()
    return inside.seconds / (time.perf_counter() - start)


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5, tokens=list(TOKENS), selected=512)
    selected = run.options.selected
    for way in WAYS:
        warm_up(way, selected)
    for tokens in run.options.tokens:
        ways = {x: name for x, name in WAYS.items() if x != "eager" or tokens <= LONGEST_EAGER}
        memory = {
            name: extra_memory(partial(first_step, way, tokens, selected))
            for way, name in ways.items()
        }
        steps = {name: training_step(way, tokens, selected) for way, name in ways.items()}
        shares = {name: share_of_operators(step) for name, step in steps.items()}
        # Longer steps vary less, so fewer rounds do.
        rounds = max(1, min(run.rounds, 8192 // tokens))
        case = f"{tokens} tokens"
        seconds = interleaved(steps, rounds, warm=True)
        run.show(case, seconds, tokens=tokens, selected=selected)
        run.add_to_all(case, "bytes", memory)
        run.add_to_all(case, "share_of_operators", shares)


if __name__ == "__main__":
    main()
