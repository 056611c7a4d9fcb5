"""A layer of DeepSeek Sparse Attention: indexer, attention and loss, in one process or in many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from torch import Tensor

QUERIES = ("query", "query_rope", "query_index", "weights")
KEYS = ("latent", "key_rope", "key_index")
# The results that a rank computes for its own tokens alone.
QUERY_SIDE = (
    "indices", "values", "out", "softmax_max", "softmax_sum", *(f"d_{name}" for name in QUERIES),
)  # fmt: skip
SCALE = 0.2


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    latent: int = 32
    rope: int = 8
    index_heads: int = 4
    index: int = 16
    count: int = 8

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "query": (self.heads, self.latent), "query_rope": (self.heads, self.rope),
            "query_index": (self.index_heads, self.index), "weights": (self.index_heads,),
            "latent": (1, self.latent), "key_rope": (1, self.rope), "key_index": (1, self.index),
            "d_out": (self.heads, self.latent),
        }  # fmt: skip


def drawn(
    lengths: list[int], dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Packed tokens of all sequences, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(sum(lengths), *shape, generator=generator).bfloat16().to(dtype)
        for name, shape in shapes.items()
    }


def inputs(lengths: list[int], dtype: torch.dtype, sizes: Sizes) -> dict[str, Tensor]:
    return drawn(lengths, dtype, sizes.shapes())


def forward(
    x: dict[str, Tensor], functions: Any, sizes: Sizes, where: dict[str, Any], *,
    values: bool = False, loss: dict[str, Any] | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Calls the functions of ascend_attn_ops or its distributed, with options of the attention."""
    on_device = {
        name: torch.tensor(y, dtype=torch.int32) if isinstance(y, list) else y
        for name, y in where.items()
    }
    latent, key_rope, key_index = (x[name] for name in KEYS)
    if "shards" in where:
        key_index, latent, key_rope = functions.prefetch(key_index, latent, key_rope, **where)
    projections = x["query_index"], key_index, x["weights"]
    indices, chosen = functions.lightning_indexer(
        *projections, sparse_count=sizes.count, return_values=values, **on_device
    )
    ropes = {"query_rope": x["query_rope"], "key_rope": key_rope, "scale_value": SCALE}
    out, *statistics = functions.sparse_flash_attention(
        x["query"], latent, latent, indices, **ropes, **on_device, **options
    )
    constants = {name: y.detach() if isinstance(y, Tensor) else y for name, y in ropes.items()}
    latent = latent.detach() if isinstance(latent, Tensor) else latent
    kl_loss = functions.lightning_indexer_kl_loss(
        x["query"].detach(), latent, *projections, indices, *statistics,
        **constants, **where, **(loss or {}),
    )  # fmt: skip
    names = "indices", "values", "out", "softmax_max", "softmax_sum", "loss"
    return dict(zip(names, (indices, chosen, out, *statistics, kl_loss), strict=True))


def run(
    tokens: dict[str, Tensor], functions: Any, sizes: Sizes, where: dict[str, Any], *,
    loss: dict[str, Any] | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Forward and backward of the layer, whose tokens may have weights in the loss."""
    batched = where["layout"] == "BSND"
    leaves = {name: tokens[name].detach().clone().requires_grad_() for name in (*QUERIES, *KEYS)}
    x = {name: leaf.unsqueeze(0) if batched else leaf for name, leaf in leaves.items()}
    if "token_weight" in tokens:
        loss = {**(loss or {}), "token_weight": tokens["token_weight"]}
    results = forward(x, functions, sizes, where, values=True, loss=loss, **options)
    scores = results["values"].masked_fill(results["values"].isinf(), 0).sin().sum()
    d_out = tokens["d_out"].unsqueeze(0) if batched else tokens["d_out"]
    heads = [results["out"], results["loss"], scores]
    torch.autograd.backward(heads, [d_out, *map(torch.ones_like, heads[1:])])
    if batched:  # tokens first
        results |= {name: results[name].squeeze(0) for name in ("indices", "values", "out")}
    for name in ("softmax_max", "softmax_sum"):
        results[name] = results[name].reshape(results[name].shape[-2:])
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        results[f"d_{name}"] = leaf.grad
    return {name: value.detach() for name, value in results.items()}


def one_process(
    tokens: dict[str, Tensor], lengths: list[int], sizes: Sizes, **options: Any
) -> dict[str, Tensor]:
    ends = list(accumulate(lengths))
    packed = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends, "layout": "TND"}
    return run(tokens, ops, sizes, packed, **options)


def of_ranks(
    tokens: dict[str, Tensor], shards: SequenceShards, sizes: Sizes, layout: str = "TND",
    **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The same, for the tokens of this rank."""
    local = {name: shards.shard(x) for name, x in tokens.items()}
    return run(local, distributed, sizes, {"layout": layout, "shards": shards}, **options)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the 2-norm."""
    size = expected.double().norm().item()
    difference = (actual.double() - expected.double()).norm().item()
    return difference / size if size else difference


Errors = dict[str, tuple[float, float]]


def errors(shards: SequenceShards, names: Iterable[str], *results: dict[str, Tensor]) -> Errors:
    """Errors of results of the ranks, and of one process: the last result is the truth."""
    ranks, one, truth = results
    return {
        name: (
            relative_error(shards.unshard(ranks[name]), truth[name]),
            relative_error(one[name], truth[name]),
        )
        for name in names
    }


def assert_nearly_as_exact(found: Errors, factor: float = 1.5) -> None:
    for name, (ranks, one) in found.items():
        assert ranks <= factor * one, f"{name}: {ranks:.2e} on ranks, {one:.2e} in one process"


def gradients(x: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert x.any() or not x.numel(), name
        assert torch.equal(actual[name], x), name
