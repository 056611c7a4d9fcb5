"""The kernels with 1, 2, 4, ... threads, up to all processors that this process may use.

    python benchmarks/threads.py

A large bf16 matmul shows what more threads bring where nothing but products is computed.
"""

from __future__ import annotations

import os
from functools import partial

import flash_attention_score
import lightning_indexer
import prompt_flash_attention
import scatter_pa_kv_cache
import sparse_decode
import sparse_flash_attention
import torch
from harness import Benchmark, Call, interleaved, peak_product


def processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def counts(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`."""
    powers = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*powers, most]


def calls() -> dict[str, Call]:
    operators = torch.ops.ascend
    sparse = sparse_flash_attention.Inputs.random(sparse_flash_attention.Shape(1024, 256))
    forward = sparse_flash_attention.forward_of(sparse)
    kl_loss = lightning_indexer.make_inputs(1024, 256, 64, torch.bfloat16)
    step = sparse_decode.make_step(8, 4096)
    dense = flash_attention_score.Shape()
    prompts = prompt_flash_attention.Prompts()
    train = partial(flash_attention_score.call_of, flash_attention_score.ours, dense)
    return {
        "sparse_flash_attention": partial(sparse_flash_attention.forward_of, sparse),
        "sparse_flash_attention_grad": partial(
            sparse_flash_attention.backward_of, sparse, forward
        ),
        "sparse_lightning_indexer_grad_kl_loss": kl_loss.kl_loss,
        "lightning_indexer": partial(
            operators.lightning_indexer, kl_loss.query_index, kl_loss.key_index, kl_loss.weights,
            sparse_count=256,
        ),
        "lightning_indexer_grad": kl_loss.indexer_grad,
        "lightning_indexer, 8 decoded tokens": step.select,
        "sparse_flash_attention, 8 decoded tokens": partial(step.attend, step.select()),
        "flash_attention_score": train(False),
        "flash_attention_score, forward and backward": train(True),
        "prompt_flash_attention": prompt_flash_attention.ours(prompts),
        "prompt_flash_attention, int8": prompt_flash_attention.ours_int8(prompts),
        "scatter_pa_kv_cache_, 32768 tokens": (
            scatter_pa_kv_cache.Case.make(32768, "random").calls("Norm")["ours"]
        ),
        "torch, matmul": peak_product(),
    }  # fmt: skip


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5, most=processors())
    for threads in counts(run.options.most):
        torch.set_num_threads(threads)
        for name, seconds in interleaved(calls(), run.rounds).items():
            ours = "torch" if name.startswith("torch") else "ours"
            run.show(name, {f"{ours}, {threads} threads": seconds}, threads=threads)


if __name__ == "__main__":
    main()
