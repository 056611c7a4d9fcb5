"""The ranks of the section `communication` of `python -m ascend_attn_ops check`.

Each rank has its shards of the tokens on its own device, and compares what it gets with the call of
one device. Prints a line of JSON: the largest error of each result, relative to its maximum.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

import ascend_attn_ops as ops
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed.dense import Method
from ascend_attn_ops.distributed.shards import SequenceShards

LENGTHS = [64, 1, 190]
HEADS, DIM = 4, 64


def compare(method: Method, device: str) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    tokens = [
        torch.randn(sum(LENGTHS), HEADS, DIM, generator=generator).to(device, torch.bfloat16)
        for _ in range(4)
    ]
    ends = list(accumulate(LENGTHS))

    def gradients(leaves: list[Tensor], out: Tensor, d_out: Tensor) -> Tensor:
        return torch.cat(torch.autograd.grad(out, leaves, d_out), -1)

    leaves = [x.detach().requires_grad_() for x in tokens[:3]]
    expected, *_ = ops.flash_attention_score(
        *leaves, num_heads=HEADS, layout="TND", sparse_mode=3,
        actual_seq_lengths_query=ends, actual_seq_lengths_key=ends,
    )  # fmt: skip
    of_one = gradients(leaves, expected, tokens[3])
    shards = SequenceShards(LENGTHS)
    local = [shards.shard(x) for x in tokens]
    leaves = [x.detach().requires_grad_() for x in local[:3]]
    out, *_ = distributed.flash_attention_score(
        *leaves, num_heads=HEADS, shards=shards, sparse_mode=3, method=method
    )
    of_ranks = gradients(leaves, out, local[3])
    pairs = {"out": (out, expected), "gradients": (of_ranks, of_one)}
    return {
        name: float((x.double().cpu() - shards.shard(y).double().cpu()).abs().max() / y.abs().max())
        for name, (x, y) in pairs.items()
    }


def main() -> None:
    kind, method = sys.argv[1:]
    rank = int(os.environ["RANK"])
    device = f"{kind}:{rank}" if kind == "npu" else kind
    if kind == "npu":
        torch.get_device_module("npu").set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl" if kind == "npu" else "gloo")
    errors = compare(method, device)  # type: ignore[arg-type]
    dist.barrier()
    if rank == 0:
        print(json.dumps(errors), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
