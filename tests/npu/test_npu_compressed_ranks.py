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
HEADS, DIM, INDEX_HEADS, INDEX_DIM, COUNT = 2, 512, 8, 128, 512
SHAPES = {
    "query": (HEADS, DIM), "ori_kv": (1, DIM), "query_index": (INDEX_HEADS, INDEX_DIM),
    "weights": (INDEX_HEADS,), "d_out": (HEADS, DIM),
}  # fmt: skip


def inputs(ratio: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    overlap = 2 if ratio == 4 else 1
    features = {"values": DIM, "logits": DIM, "index_values": INDEX_DIM, "index_logits": INDEX_DIM}
    shapes: dict[str, tuple[int, ...]] = {
        **SHAPES, **{name: (overlap * size,) for name, size in features.items()}
    }  # fmt: skip
    x = {
        name: torch.randn(LENGTH, *shape, generator=generator).bfloat16()
        for name, shape in shapes.items()
    }
    x["weights"] = x["weights"].float()
    return x


def layer(x: dict[str, Tensor], functions: Any, ratio: int, **where: Any) -> dict[str, Tensor]:
    """All tensors with the batch of one first, as in layout BSND."""
    names = [name for name in x if name != "d_out"]
    leaves = {name: x[name].detach().requires_grad_() for name in names}
    device = x["query"].device

    def compress(values: str, logits: str) -> Tensor:
        bias = torch.zeros(ratio, x[values].shape[-1], dtype=torch.bfloat16, device=device)
        options = {name: value for name, value in where.items() if functions is distributed}
        keys = functions.compress_keys(
            leaves[values], leaves[logits], bias, overlap=ratio == 4, **options
        )
        return keys.unsqueeze(2)

    attention = {
        "scale_value": DIM**-0.5, "sink": torch.zeros(HEADS, device=device), "cmp_ratio": ratio,
        "layout": "BSND",
    }  # fmt: skip
    cmp_kv = compress("values", "logits")
    losses: list[Tensor] = []
    if ratio == 4:
        indexer = (
            leaves["query_index"], compress("index_values", "index_logits"), leaves["weights"],
        )  # fmt: skip
        indices, _ = functions.lightning_indexer(
            *(y.detach() for y in indexer), sparse_count=COUNT, cmp_ratio=ratio,
            **{"layout": "BSND", **where},
        )  # fmt: skip
        out = functions.sparse_flash_mla_with_indexer_loss(
            leaves["query"], leaves["ori_kv"], cmp_kv, indices, *indexer, on_loss=losses.append,
            **{**attention, **where},
        )  # fmt: skip
    else:
        out, _ = functions.sparse_flash_mla(
            leaves["query"], leaves["ori_kv"], cmp_kv, **{**attention, **where}
        )
    out.backward(x["d_out"])
    results = {f"d_{name}": y.grad for name, y in leaves.items() if y.grad is not None}
    if losses:
        (results["loss"],) = losses
    return {"out": out.detach(), **results}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    shards = SequenceShards([LENGTH], order="contiguous")
    for ratio in (4, 128):
        x = {name: y.npu().unsqueeze(0) for name, y in inputs(ratio).items()}
        expected = layer(x, ops, ratio)
        local = {name: shards.shard(y, 1) for name, y in x.items()}
        actual = layer(local, distributed, ratio, shards=shards, layout="BSND")
        assert actual.keys() == expected.keys()
        assert len(actual) == (10 if ratio == 4 else 5)
        for name, y in expected.items():
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
