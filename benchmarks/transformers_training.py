"""A training step of transformers' DeepSeek-V3.2: ours beside its eager and its sdpa attention.

    python benchmarks/transformers_training.py [--tokens 2048 4096]

One layer with the attention's sizes of the model, 64 heads, in bfloat16, without experts: forward
and backward, tokens/s and the peak memory that a step adds to a fresh process. Ours trains the
indexer as well, which transformers does not. All implementations are timed in turn, in one process;
memory is measured in a process of its own for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import torch
import transformers
from ascend_attn_ops.transformers import enable_dsa
from harness import extra_memory, interleaved_medians, recorder
from results import parser

IMPLEMENTATIONS = ("ours", "eager", "sdpa")


def training_step(
    implementation: str, tokens: int, heads: int, selected: int
) -> Callable[[], object]:
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
        # K of a laptop is none of the NPU's loss.
        with ops.limits(None):
            model(text, labels=text, use_cache=False).loss.backward()

    return step


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    options.add_argument("--heads", type=int, default=64)
    options.add_argument("--selected", type=int, default=512, help="keys per token")
    arguments = options.parse_args()
    record = recorder("transformers_training", arguments.json)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads: {arguments.heads} heads, {arguments.selected} keys"
    )
    print(f"{'':32} {'tokens/s':>9} {'x slower':>9} {'peak, MB':>9}")
    for tokens in arguments.tokens:
        make = {
            name: partial(training_step, name, tokens, arguments.heads, arguments.selected)
            for name in IMPLEMENTATIONS
        }
        memory = {name: extra_memory(of_one) for name, of_one in make.items()}
        calls = {name: of_one() for name, of_one in make.items()}
        # Longer steps vary less, so fewer rounds do.
        rounds = max(1, arguments.rounds * min(arguments.tokens) // tokens)
        seconds = interleaved_medians(calls, rounds)
        for name, time in seconds.items():
            print(
                f"{f'{tokens} tokens, {name}':32} {tokens / time:9.0f} "
                f"{time / seconds['ours']:9.1f} {memory[name] / 1e6:9.0f}",
                flush=True,
            )
            record.add(f"{tokens} tokens", name, seconds=time, bytes=memory[name], tokens=tokens)


if __name__ == "__main__":
    main()
