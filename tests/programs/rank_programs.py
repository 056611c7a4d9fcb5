"""Programs for several ranks: fully sharded training, and sequences shared by two ranks."""

from __future__ import annotations

import ascend_attn_ops as ops
import dsa_model
import torch
from ascend_attn_ops import distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard_model(model: nn.Module, ranks: int, compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        if compiled:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shared_sequences(
    model: dsa_model.SparseLM, text: Tensor, lengths: list[int], group: ProcessGroup
) -> Tensor:
    """One forward and backward over packed texts (T,), of whose tokens each rank has its own."""
    shards = distributed.SequenceShards(lengths, group)
    x = model.embedding(shards.shard(text))
    losses = []
    for layer in model.layers:
        normed = layer.norm(x)
        query, query_rope, latent, key_rope = layer.project(normed)
        projections = layer.indexer(normed.detach(), shards.positions())
        key_index, latent, key_rope = distributed.prefetch(
            projections[1], latent, key_rope, shards=shards
        )
        projections = projections[0], key_index, projections[2]
        options = {"query_rope": query_rope, "key_rope": key_rope, "scale_value": dsa_model.SCALE}
        keys, _ = distributed.lightning_indexer(
            *projections, sparse_count=dsa_model.KEYS, shards=shards
        )
        out, *statistics = distributed.sparse_flash_attention(
            query, latent, latent, keys, **options, shards=shards
        )
        loss = distributed.lightning_indexer_kl_loss(
            query, latent, *projections, keys, *statistics, **options, shards=shards,
            reduction="mean",
        )  # fmt: skip
        losses.append(loss)
        x = x + layer.out(ops.attach_loss(out, loss).flatten(-2))
    targets = shards.shard(text.roll(-1))
    logits = model.head(x).float()
    mine = nn.functional.cross_entropy(logits, targets, reduction="sum") / shards.tokens
    mine.backward()
    for parameter in model.parameters():  # each rank has the part of its tokens
        torch.distributed.all_reduce(parameter.grad, group=group)
    return torch.stack(losses).detach()
