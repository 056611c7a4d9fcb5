"""Servers on pages: continuous batching of a dense model, and of a layer of sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ascend_attn_ops as ops
import dsa_model
import torch
from dense_model import HEADS, KEY_HEADS, SIZE, DenseLM
from torch import Tensor

BLOCK, BLOCKS = 128, 12


@dataclass
class Request:
    text: list[Any]  # numbers of tokens, or their hidden states
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Pages:
    """The blocks of each request, and the slots of the new tokens of a step."""

    def __init__(self) -> None:
        self.free = list(range(BLOCKS))

    def place(self, requests: list[Request]) -> tuple[Tensor, Tensor, list[int], list[int], Tensor]:
        for request in requests:
            while len(request.blocks) * BLOCK < len(request.text):
                request.blocks.append(self.free.pop())
        most = max(len(x.blocks) for x in requests)
        rows = [x.blocks + [-1] * (most - len(x.blocks)) for x in requests]
        table = torch.tensor(rows, dtype=torch.int32)
        counts = torch.tensor([len(x.text) - x.cached for x in requests])
        lengths = [len(x.text) for x in requests]
        positions = torch.cat([torch.arange(x.cached, len(x.text)) for x in requests])
        owners = torch.arange(len(requests)).repeat_interleave(counts)
        slots = ops.slot_mapping(table[owners], positions, BLOCK)
        for request in requests:
            request.cached = len(request.text)
        return table, slots, counts.cumsum(0).tolist(), lengths, positions

    def end(self, request: Request) -> None:
        self.free += request.blocks


def forward(
    model: DenseLM, caches: list[tuple[Tensor, Tensor]], tokens: Tensor, table: Tensor,
    slots: Tensor, ends: list[int], lengths: list[int],
) -> Tensor:  # fmt: skip
    """Logits of packed tokens (T,), whose keys and values are written to the caches."""
    x = model.embedding(tokens)
    for layer, (key_cache, value_cache) in zip(model.layers, caches, strict=True):
        query, key, value = layer.project(x)
        ops.scatter_pa_kv_cache_(key, key_cache, slots, value, value_cache)
        out, _ = ops.fused_infer_attention_score(
            query, key_cache.flatten(2), value_cache.flatten(2), num_heads=HEADS,
            num_key_value_heads=KEY_HEADS, layout="TND", sparse_mode=3, block_table=table,
            actual_seq_lengths_query=ends, actual_seq_lengths_key=lengths,
        )  # fmt: skip
        x = x + layer.out(out.flatten(-2))
    return model.head(x)


class Server:
    def __init__(self, model: DenseLM, decode: Callable[..., Tensor] = forward) -> None:
        self.model, self.decode, self.pages = model, decode, Pages()
        shape = (BLOCKS, BLOCK, KEY_HEADS, SIZE)
        self.caches = [
            (torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
            for _ in model.layers
        ]

    @torch.no_grad()
    def step(self, requests: list[Request]) -> Tensor:
        """Appends a token to each request, and returns the logits (requests, VOCABULARY)."""
        new = torch.tensor([token for x in requests for token in x.text[x.cached :]])
        table, slots, ends, lengths, _ = self.pages.place(requests)
        run = self.decode if len(new) == len(requests) else forward
        logits = run(self.model, self.caches, new, table, slots, ends, lengths)
        logits = logits[torch.tensor(ends) - 1]
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.text.append(token)
        return logits


class SparseLayerServer:
    """Attends to the `count` best keys of each request; its texts are hidden states (HIDDEN,)."""

    def __init__(self, layer: dsa_model.Layer, count: int) -> None:
        self.layer, self.count, self.pages = layer, count, Pages()
        self.latents, self.ropes, self.index_keys = (
            torch.zeros(BLOCKS, BLOCK, 1, size, dtype=torch.bfloat16)
            for size in (dsa_model.LATENT, dsa_model.ROPE, 128)
        )

    @torch.no_grad()
    def step(self, requests: list[Request]) -> tuple[Tensor, Tensor]:
        """The attention's output for the new tokens, and the keys that they selected."""
        hidden = torch.stack([token for x in requests for token in x.text[x.cached :]])
        table, slots, ends, lengths, positions = self.pages.place(requests)
        query, query_rope, latent, key_rope = self.layer.project(hidden)
        query_index, key_index, weights = self.layer.indexer(hidden, positions)
        ops.scatter_pa_kv_cache_(latent, self.latents, slots, key_rope, self.ropes)
        ops.scatter_pa_kv_cache_(key_index, self.index_keys, slots)
        pages: dict[str, Any] = {
            "layout": "TND", "block_table": table,
            "actual_seq_lengths_query": torch.tensor(ends, dtype=torch.int32),
            "actual_seq_lengths_key": torch.tensor(lengths, dtype=torch.int32),
        }  # fmt: skip
        keys, _ = ops.lightning_indexer(
            query_index, self.index_keys, weights, sparse_count=self.count, layout_key="PA_BSND",
            **pages,
        )  # fmt: skip
        out, *_ = ops.sparse_flash_attention(
            query, self.latents, self.latents, keys, scale_value=dsa_model.SCALE,
            query_rope=query_rope, key_rope=self.ropes, layout_kv="PA_BSND", **pages,
        )  # fmt: skip
        return out, keys
