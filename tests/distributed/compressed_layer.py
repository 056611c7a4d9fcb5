"""The three kinds of layers of DeepSeek-V4, in one process or in many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import drawn
from torch import Tensor

SCALE = 0.2
LEFT = 7
HEADS, DIM, INDEX_HEADS, INDEX_DIM, COUNT = 4, 16, 4, 8, 5


@dataclass(frozen=True)
class Kind:
    """A kind of layer, by the tokens of a compressed key."""

    ratio: int = 1
    selects: bool = False

    @property
    def queries(self) -> tuple[str, ...]:
        return ("query", *(("query_index", "weights") if self.selects else ()))

    @property
    def keys(self) -> tuple[str, ...]:
        if self.ratio == 1:
            return ("ori_kv",)
        own = ("ori_kv", "values", "logits")
        return (*own, "index_values", "index_logits") if self.selects else own


SWA, HCA, CSA = Kind(), Kind(8), Kind(4, selects=True)
KINDS = {"SWA": SWA, "HCA": HCA, "CSA": CSA}

SHAPES = {
    "query": (HEADS, DIM), "ori_kv": (1, DIM), "d_out": (HEADS, DIM),
    "query_index": (INDEX_HEADS, INDEX_DIM), "weights": (INDEX_HEADS,),
}  # fmt: skip


def inputs(lengths: list[int], kind: Kind, dtype: torch.dtype) -> dict[str, Tensor]:
    # With an overlap, a key also has the window before.
    times = 2 if kind.selects else 1
    features = {"values": DIM, "logits": DIM, "index_values": INDEX_DIM, "index_logits": INDEX_DIM}
    widened = {name: (times * size,) for name, size in features.items()}
    return drawn(lengths, dtype, SHAPES | widened)


@dataclass
class Functions:
    """The functions that a layer calls: of one process, or of a rank."""

    compress: Callable[..., Tensor]
    select: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_and_learn: Callable[..., Tensor]


def of_one_process(lengths: list[int]) -> Functions:
    ends = list(accumulate(lengths))

    def packed(function: Callable[..., Any], *keys: str) -> Callable[..., Any]:
        def call(*tensors: Tensor, cmp_ratio: int, **options: Any) -> Any:
            of_keys = list(accumulate(length // cmp_ratio for length in lengths))
            lists = {"actual_seq_lengths_query": ends}
            for key in keys:
                lists[f"actual_seq_lengths_{key}"] = ends if key == "ori_kv" else of_keys
            return function(*tensors, cmp_ratio=cmp_ratio, layout="TND", **lists, **options)

        return call

    both = "ori_kv", "cmp_kv"
    return Functions(
        partial(ops.compress_keys, actual_seq_lengths=ends), packed(ops.lightning_indexer, "key"),
        packed(ops.sparse_flash_mla, *both), packed(ops.sparse_flash_mla_with_indexer_loss, *both),
    )  # fmt: skip


def of_a_rank(shards: SequenceShards, layout: str = "TND", **options: Any) -> Functions:
    where: dict[str, Any] = {"shards": shards, "layout": layout}
    return Functions(
        partial(distributed.compress_keys, **where),
        partial(distributed.lightning_indexer, **where),
        partial(distributed.sparse_flash_mla, **where, **options),
        partial(distributed.sparse_flash_mla_with_indexer_loss, **where, **options),
    )


def leaves_of(tokens: dict[str, Tensor], kind: Kind) -> dict[str, Tensor]:
    """The tokens of a layer, its sink and the biases of its compressors."""
    x = {name: tokens[name].detach().clone() for name in (*kind.queries, *kind.keys)}
    dtype = tokens["query"].dtype
    x["sink"] = torch.linspace(-2, 2, HEADS, dtype=wide(dtype))
    for name in ("values", "index_values"):
        if name in x:
            size = x[name].shape[-1]
            bias = torch.linspace(-1, 1, kind.ratio * size, dtype=dtype)
            x[f"bias of {name}"] = bias.reshape(-1, size)
    if "weights" in x:
        x["weights"] = x["weights"].to(wide(dtype))
    return {name: leaf.requires_grad_() for name, leaf in x.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    x: dict[str, Tensor], functions: Functions, kind: Kind,
    on_loss: Callable[[Tensor], None] | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    def compress(values: str, logits: str) -> Tensor:
        keys = functions.compress(
            x[values], x[logits], x[f"bias of {values}"], overlap=kind.selects
        )
        return keys.unsqueeze(-2)

    attention = {"scale_value": SCALE, "sink": x["sink"], "cmp_ratio": kind.ratio}
    attention |= {"ori_win_left": LEFT, **options}
    if kind.ratio == 1:
        out, lse = functions.attend(x["query"], x["ori_kv"], **attention)
        return {"out": out, "lse": lse}
    cmp_kv = compress("values", "logits")
    if not kind.selects:
        out, lse = functions.attend(x["query"], x["ori_kv"], cmp_kv, **attention)
        return {"cmp_kv": cmp_kv, "out": out, "lse": lse}
    indexer = x["query_index"], compress("index_values", "index_logits"), x["weights"]
    indices, _ = functions.select(
        *(y.detach() for y in indexer), sparse_count=COUNT, cmp_ratio=kind.ratio
    )
    out, lse = functions.attend(x["query"], x["ori_kv"], cmp_kv, indices, **attention)
    trained = functions.attend_and_learn(
        x["query"], x["ori_kv"], cmp_kv, indices, *indexer, **attention,
        indexer_loss_weight=0.5, on_loss=on_loss,
    )  # fmt: skip
    return {"cmp_kv": cmp_kv, "indices": indices, "out": trained, "attended": out, "lse": lse}


def run(
    tokens: dict[str, Tensor], functions: Functions, kind: Kind, *, batched: bool = False,
    **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Forward and backward of a layer; all results have the tokens, or the keys, first."""
    leaves = leaves_of(tokens, kind)
    x = {
        name: leaf.unsqueeze(0) if batched and name in tokens else leaf
        for name, leaf in leaves.items()
    }
    losses: list[Tensor] = []
    results = forward(x, functions, kind, losses.append, **options)
    d_out = tokens["d_out"].unsqueeze(0) if batched else tokens["d_out"]
    results["out"].backward(d_out)
    results["lse"] = results["lse"].squeeze(0)
    if batched:
        results = {name: value.squeeze(0) for name, value in results.items()}
    if losses:
        (results["loss"],) = losses
    results |= {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len([name for name in results if name.startswith("d_")]) == len(leaves)
    return {name: value.detach() for name, value in results.items()}
