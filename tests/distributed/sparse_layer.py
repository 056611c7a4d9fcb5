"""A layer of DeepSeek Sparse Attention: indexer, attention and loss, in one process or in many."""

from __future__ import annotations

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
    "indices", "out", "softmax_max", "softmax_sum", *(f"d_{name}" for name in QUERIES),
)  # fmt: skip


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
            "query": (self.heads, self.latent),
            "query_rope": (self.heads, self.rope),
            "query_index": (self.index_heads, self.index),
            "weights": (self.index_heads,),
            "latent": (1, self.latent),
            "key_rope": (1, self.rope),
            "key_index": (1, self.index),
            "d_out": (self.heads, self.latent),
        }


SCALE = 0.2


def inputs(
    lengths: list[int], dtype: torch.dtype, sizes: Sizes, seed: int = 0
) -> dict[str, Tensor]:
    """Packed tokens of all sequences, and a gradient of the output; rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(sum(lengths), *shape, generator=generator).bfloat16().to(dtype)
        for name, shape in sizes.shapes().items()
    }


def run(
    tokens: dict[str, Tensor],
    functions: Any,
    sizes: Sizes,
    *,
    layout: str = "TND",
    lengths: list[int] | None = None,
    shards: SequenceShards | None = None,
    reduction: str = "sum",
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward of the layer, with `functions` = ascend_attn_ops or its distributed."""
    leaves = {name: tokens[name].detach().clone().requires_grad_() for name in (*QUERIES, *KEYS)}
    x = {name: leaf.unsqueeze(0) if layout == "BSND" else leaf for name, leaf in leaves.items()}
    where: dict[str, Any] = {"layout": layout}
    on_host: dict[str, Any] = {"layout": layout}
    ahead: dict[str, Any] = {}
    if shards is not None:
        where["shards"] = on_host["shards"] = shards
        ahead["prefetch"] = (x["latent"], x["key_rope"])
    elif layout == "TND":
        assert lengths is not None
        ends = list(accumulate(lengths))
        for name in ("actual_seq_lengths_query", "actual_seq_lengths_key"):
            on_host[name] = ends
            where[name] = torch.tensor(ends, dtype=torch.int32)
    ropes = {"query_rope": x["query_rope"], "key_rope": x["key_rope"], "scale_value": SCALE}
    indices, _ = functions.lightning_indexer(
        x["query_index"].detach(), x["key_index"].detach(), x["weights"].detach(),
        sparse_count=sizes.count, **where, **ahead,
    )  # fmt: skip
    out, softmax_max, softmax_sum = functions.sparse_flash_attention(
        x["query"], x["latent"], x["latent"], indices, **ropes, **where, **options
    )
    loss = functions.lightning_indexer_kl_loss(
        x["query"], x["latent"], x["query_index"], x["key_index"], x["weights"], indices,
        softmax_max, softmax_sum, **ropes, **on_host, reduction=reduction,
    )  # fmt: skip
    d_out = tokens["d_out"].unsqueeze(0) if layout == "BSND" else tokens["d_out"]
    torch.autograd.backward([out, loss], [d_out, torch.ones_like(loss)])
    results = {"indices": indices, "out": out}
    # Tokens first.
    results |= {name: value.squeeze(0) for name, value in results.items() if layout == "BSND"}
    for name, value in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
        results[name] = value.reshape(value.shape[-2:])
    results["loss"] = loss.detach()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        results[f"d_{name}"] = leaf.grad
    return {name: value.detach() for name, value in results.items()}


def one_process(
    tokens: dict[str, Tensor], lengths: list[int], sizes: Sizes, **options: Any
) -> dict[str, Tensor]:
    return run(tokens, ops, sizes, lengths=lengths, **options)


def of_ranks(
    tokens: dict[str, Tensor], shards: SequenceShards, sizes: Sizes, **options: Any
) -> dict[str, Tensor]:
    """The same, for the tokens of this rank."""
    local = {name: shards.shard(x) for name, x in tokens.items()}
    return run(local, distributed, sizes, shards=shards, **options)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the 2-norm."""
    size = expected.double().norm().item()
    difference = (actual.double() - expected.double()).norm().item()
    return difference / size if size else difference
