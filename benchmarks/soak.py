"""The memory of a process over many training steps of all operators, on tiny tensors.

    python benchmarks/soak.py [--steps 100000]

A step is the layer of DeepSeek Sparse Attention with its loss, dense attention and the merge of its
parts, forward and backward, and one write to a paged cache. A call that kept 100 bytes would show
as 10 MB after 100,000 steps. `python -m cann_simulator benchmarks/soak.py
--device npu` does it with torch_npu over the simulated CANN.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ascend_attn_ops as ops
import torch
from harness import process_memory
from torch import Tensor

ROWS = 10


def tensor(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(device, dtype).requires_grad_()


class Steps:
    def __init__(self, device: str) -> None:
        self.query, self.latent = tensor(device, 6, 2, 16), tensor(device, 9, 1, 16)
        self.query_index, self.key_index = tensor(device, 6, 2, 8), tensor(device, 9, 1, 8)
        self.weights = tensor(device, 6, 2)
        self.dense = [tensor(device, 1, 2, n, 16) for n in (6, 9, 9)]
        self.lse = [tensor(device, 5, dtype=torch.float32) for _ in range(3)]
        self.parts = [tensor(device, 5, 16) for _ in range(3)]
        self.rows = tensor(device, 3, 2, 16).detach()
        self.cache = tensor(device, 4, 8, 2, 16).detach()
        self.slots = torch.tensor([0, 9, 31], device=device)

    def leaves(self) -> list[Tensor]:
        sparse = [self.query, self.latent, self.query_index, self.key_index, self.weights]
        return [*sparse, *self.dense, *self.lse, *self.parts]

    def step(self) -> None:
        where: dict[str, Any] = {
            "layout": "TND", "actual_seq_lengths_query": [2, 6], "actual_seq_lengths_key": [4, 9]
        }  # fmt: skip
        indices, _ = ops.lightning_indexer(
            self.query_index.detach(), self.key_index.detach(), self.weights.detach(),
            sparse_count=4, **where,
        )  # fmt: skip
        out, *statistics = ops.sparse_flash_attention(
            self.query, self.latent, self.latent, indices, scale_value=0.25, **where
        )
        loss = ops.lightning_indexer_kl_loss(
            self.query, self.latent, self.query_index, self.key_index, self.weights, indices,
            *statistics, scale_value=0.25, **where,
        )  # fmt: skip
        dense, *_ = ops.flash_attention_score(
            *self.dense, num_heads=2, layout="BNSD", sparse_mode=3, dropout_p=0.1
        )
        prefill = ops.prompt_flash_attention(
            *(x.detach() for x in self.dense), num_heads=2, layout="BNSD"
        )
        merged, lse = ops.attention_update(self.lse, self.parts)
        ops.scatter_pa_kv_cache_(self.rows, self.cache, self.slots)
        results = [out, loss, dense, merged, lse]
        torch.autograd.grad([x.sum() for x in results], self.leaves())
        del prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"])
    arguments = parser.parse_args()
    steps = Steps(arguments.device)
    print(f"{arguments.steps} steps on {arguments.device}, {torch.get_num_threads()} threads")
    with ops.limits(None):
        for _ in range(200):  # what is made once
            steps.step()
        start, first = time.perf_counter(), process_memory("VmRSS")
        for row in range(1, ROWS + 1):
            for _ in range(arguments.steps // ROWS):
                steps.step()
            done = arguments.steps // ROWS * row
            now = process_memory("VmRSS")
            each = (now - first) / done
            seconds = time.perf_counter() - start
            print(
                f"{done:8} steps {seconds:7.1f} s  {now / 2**20:8.1f} MiB resident, "
                f"{(now - first) / 1e3:+9.1f} kB, {each:+6.1f} bytes per step",
                flush=True,
            )


if __name__ == "__main__":
    main()
