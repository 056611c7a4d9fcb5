"""A training step of transformers' DeepSeek-V3.2: ours beside its eager and its sdpa attention.

    python benchmarks/transformers_training.py [--tokens 2048 4096]

One layer with the attention's sizes of the model, 64 heads, in bfloat16, without experts: forward
and backward, tokens/s and the peak memory that a step adds to a fresh process. Ours trains the
indexer as well, which transformers does not. All implementations are timed in turn, in one process;
memory is measured in a process of its own for each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from ascend_attn_ops.transformers import enable_dsa
from harness import Benchmark, Call, extra_memory, interleaved

IMPLEMENTATIONS = ("ours", "eager", "sdpa")


def training_step(implementation: str, tokens: int, heads: int, selected: int) -> Call:
    """Make a model and return its training step."""
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        first_k_dense_replace=1,  # no experts
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=512,
        index_n_heads=64,
        index_topk=selected,
        max_position_embeddings=tokens,
        attn_implementation="sdpa" if implementation == "sdpa" else "eager",
    )
    model: Any = transformers.DeepseekV32ForCausalLM(config).bfloat16().train()
    if implementation == "ours":
        enable_dsa(model)
    text = torch.randint(256, (1, tokens))

    def step() -> None:
        model.zero_grad()
        model(text, labels=text, use_cache=False).loss.backward()

    return step


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=3, tokens=[2048, 4096], heads=64, selected=512)
    options = run.options
    for tokens in options.tokens:
        make = {
            name: partial(training_step, name, tokens, options.heads, options.selected)
            for name in IMPLEMENTATIONS
        }
        memory = {name: extra_memory(of_one) for name, of_one in make.items()}
        # Longer steps vary less, so fewer rounds do.
        rounds = max(1, run.rounds * min(options.tokens) // tokens)
        seconds = interleaved({name: of_one() for name, of_one in make.items()}, rounds)
        run.show(f"{tokens} tokens", seconds, tokens=tokens)
        run.add_to_all(f"{tokens} tokens", "bytes", memory)


if __name__ == "__main__":
    main()
