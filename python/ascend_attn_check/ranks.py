"""The ranks of the section `communication` of `python -m ascend_attn_check`.

Each rank has its shards of the tokens on its own device, and compares what it gets with the call of
one device. Prints a line of JSON for each method: the method, and for each operator the largest
error of each result, relative to its maximum; as "refusal" the message, if the limits of the device
refuse the other operators, or CANN lacks them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import torch
import torch.distributed as dist
from ascend_attn_ops import distributed
from ascend_attn_ops._core import library
from ascend_attn_ops.distributed.shards import SequenceShards
from ascend_attn_ops.reference.bounds.expected import relative_difference
from torch import Tensor

LENGTHS = [64, 1, 190]
HEADS = 4
DENSE: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value", "d_out"), (HEADS, 64))
# Every release trains with 2048 keys on a device: all visible ones of these lengths.
SELECTED = {"npu": 2048, "cpu": 24}
# The tokens of a layer of sparse attention; `latent` is both key and value.
SPARSE = {
    "query": (64, 512), "query_rope": (64, 64), "query_index": (64, 128), "weights": (64,),
    "latent": (1, 512), "key_rope": (1, 64), "key_index": (1, 128),
    "d_out": (64, 512), "d_values": (1,),
}  # fmt: skip
SCALE = 192**-0.5
INDEXER = ("query_index", "key_index", "weights")
ATTENTION = ("query", "latent", "query_rope", "key_rope")

Results = dict[str, Tensor]
Errors = dict[str, dict[str, float] | str]


def random_tokens(device: str, shapes: dict[str, tuple[int, ...]]) -> Results:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(sum(LENGTHS), *shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the maximum; for integers, how many elements differ."""
    if not actual.is_floating_point():
        return float((actual.cpu() != expected.cpu()).sum())
    # A device that leaves out a key has no score where the other one has: an infinite error.
    return relative_difference(actual.cpu(), expected.cpu())


def errors(of_ranks: Results, of_one: Results, shards: SequenceShards) -> dict[str, float]:
    return {
        name: error(x, of_one[name] if x.dim() == 0 else shards.shard(of_one[name]))
        for name, x in of_ranks.items()
    }


def dense(call: Any, tokens: Results, **where: Any) -> Iterator[tuple[str, Results]]:
    *leaves, d_out = (x.detach().requires_grad_() for x in tokens.values())
    out, *_ = call(*leaves, num_heads=HEADS, sparse_mode=3, **where)
    gradients = torch.autograd.grad(out, leaves, d_out.detach())
    found = {"out": out.detach(), "gradients": torch.cat(gradients, -1)}
    yield "flash_attention_score", found


def layer(
    functions: Any, tokens: Results, selected: int, **where: Any
) -> Iterator[tuple[str, Results]]:
    """The results of the three operators of a layer, which goes on with its own."""
    x = {name: y.detach().requires_grad_() for name, y in tokens.items()}

    def gradients(names: tuple[str, ...], result: Tensor, d: Tensor | None = None) -> Results:
        found = torch.autograd.grad(result, [x[name] for name in names], d)
        return {f"d_{name}": y for name, y in zip(names, found, strict=True)}

    indexer = [x[name] for name in INDEXER]
    indices, values = functions.lightning_indexer(
        *indexer, sparse_count=selected, return_values=True, **where
    )
    # An early row sees fewer keys; there is -1 in the place of the others.
    d_values = torch.where(indices < 0, 0, tokens["d_values"].unsqueeze(-1)).to(values.dtype)
    # Keys of nearly the same score may exchange their places.
    keys = indices.cpu().sort(-1).values.to(indices.device)
    found = {"keys": keys, "values": values.detach(), **gradients(INDEXER, values, d_values)}
    yield "lightning_indexer", found

    attention = {"scale_value": SCALE, "query_rope": x["query_rope"], "key_rope": x["key_rope"]}
    out, *statistics = functions.sparse_flash_attention(
        x["query"], x["latent"], x["latent"], indices, **attention, **where
    )
    # Tokens first.
    softmax_max, softmax_sum = (y.reshape(y.shape[-2:]) for y in statistics)
    found = {"out": out.detach(), "softmax_max": softmax_max, "softmax_sum": softmax_sum}
    yield "sparse_flash_attention", {**found, **gradients(ATTENTION, out, tokens["d_out"])}

    loss = functions.lightning_indexer_kl_loss(
        x["query"], x["latent"], *indexer, indices, *statistics, **attention, **where
    )
    yield "lightning_indexer_kl_loss", {"loss": loss.detach(), **gradients(INDEXER, loss)}


def found_by(method: str, kind: str, device: str) -> Errors:
    """The operators of a method."""
    sparse = method == "sparse"
    tokens = random_tokens(device, SPARSE if sparse else DENSE)
    shards = SequenceShards(LENGTHS)
    local = {name: shards.shard(x) for name, x in tokens.items()}
    ends = list(accumulate(LENGTHS))
    packed = {"layout": "TND", "actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
    if sparse:
        of_one = layer(ops, tokens, SELECTED[kind], **packed)
        of_ranks = layer(distributed, local, SELECTED[kind], shards=shards)
    else:
        of_one = dense(ops.flash_attention_score, tokens, **packed)
        of_ranks = dense(distributed.flash_attention_score, local, shards=shards, method=method)
    found: Errors = {}
    try:
        for (name, one), (_, of_rank) in zip(of_one, of_ranks, strict=True):
            found[name] = errors(of_rank, one, shards)
    except (ValueError, NotImplementedError) as error:
        return found | refusal(error)
    return found


def refusal(error: Exception) -> Errors:
    if "Ascend " not in str(error) and library.LACKS not in str(error):
        raise error
    return {"refusal": str(error)}


def main() -> None:
    kind, *methods = sys.argv[1:]
    rank = int(os.environ["RANK"])
    device = f"{kind}:{rank}" if kind == "npu" else kind
    if kind == "npu":
        torch.get_device_module("npu").set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl" if kind == "npu" else "gloo")
    for method in methods:
        with ops.limits(None) if kind == "cpu" else nullcontext():
            found = found_by(method, kind, device)
        dist.barrier()
        if rank == 0:
            print(json.dumps({"method": method, "errors": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
