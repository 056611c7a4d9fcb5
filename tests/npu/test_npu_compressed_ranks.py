"""DeepSeek-V4's attention with its tokens on several simulated NPUs, as on one of them."""

from __future__ import annotations

import os
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from support.simulated_npu import on_ranks, once
from support.turns import nightly
from torch import Tensor

# The edges of the shards are in windows of the attention and of the compressor.
LENGTH = 300
HEADS, DIM, INDEX_HEADS, INDEX_DIM, COUNT, RATIO = 2, 512, 8, 128, 512, 4
SHAPES = {
    "query": (HEADS, DIM), "ori_kv": (1, DIM), "query_index": (INDEX_HEADS, INDEX_DIM),
    "weights": (INDEX_HEADS,), "d_out": (HEADS, DIM), "values": (2 * DIM,), "logits": (2 * DIM,),
    "index_values": (2 * INDEX_DIM,), "index_logits": (2 * INDEX_DIM,),
}  # fmt: skip


def layer(x: dict[str, Tensor], functions: Any, **where: Any) -> dict[str, Tensor]:
    """All tensors with the batch of one first, as in layout BSND."""
    leaves = {name: y.detach().requires_grad_() for name, y in x.items() if name != "d_out"}
    device = x["query"].device

    def compress(values: str, logits: str) -> Tensor:
        bias = torch.zeros(RATIO, x[values].shape[-1], dtype=torch.bfloat16, device=device)
        options = where if functions is distributed else {}
        keys = functions.compress_keys(
            leaves[values], leaves[logits], bias, overlap=True, **options
        )
        return keys.unsqueeze(2)

    options = {"cmp_ratio": RATIO, "layout": "BSND", **where}
    indexer = leaves["query_index"], compress("index_values", "index_logits"), leaves["weights"]
    indices, _ = functions.lightning_indexer(
        *(y.detach() for y in indexer), sparse_count=COUNT, **options
    )
    losses: list[Tensor] = []
    out = functions.sparse_flash_mla_with_indexer_loss(
        leaves["query"], leaves["ori_kv"], compress("values", "logits"), indices, *indexer,
        scale_value=DIM**-0.5, sink=torch.zeros(HEADS, device=device), on_loss=losses.append,
        **options,
    )  # fmt: skip
    out.backward(x["d_out"])
    results = {f"d_{name}": y.grad for name, y in leaves.items()}
    return {"out": out.detach(), "loss": losses[0], **results}


def main() -> None:
    torch.npu.set_device(int(os.environ["RANK"]))
    dist.init_process_group("cpu:gloo,npu:hccl")
    shards = SequenceShards([LENGTH], order="contiguous")
    torch.manual_seed(0)
    x = {name: torch.randn(1, LENGTH, *shape).bfloat16().npu() for name, shape in SHAPES.items()}
    x["weights"] = x["weights"].float()
    local = {name: shards.shard(y, 1) for name, y in x.items()}
    actual = layer(local, distributed, shards=shards, layout="BSND")
    for name, y in layer(x, ops).items():
        mine = actual[name] if name == "loss" else shards.unshard(actual[name], 1)
        assert mine.device.type == "npu"
        # Gradients of keys are rounded once more.
        error = (mine.float() - y.float()).norm() / y.float().norm()
        assert error.item() <= 1e-2, (name, error.item())
        if name in ("out", "d_query", "d_query_index"):
            assert torch.equal(mine, y), name
    dist.destroy_process_group()


@once
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=nightly)])
def test_results_are_those_of_one_device(ranks: int) -> None:
    for ended in on_ranks(ranks, "import test_npu_compressed_ranks as x\nx.main()"):
        assert ended.status == 0, ended.err
