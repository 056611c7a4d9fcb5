"""A byte-level language model with DeepSeek Sparse Attention, built on this library's operators.

Attention is absorbed MLA, ascend_attn_ops.LatentAttention: each token stores ONE latent and a small
rotary key, which serve all heads. A ``Select`` function decides which stored tokens a query attends
to: all of them, those that the lightning indexer prefers, or any other selection to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from ascend_attn_ops.nn.latent_attention import LatentAttention, LatentInputs
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 2
    hidden_size: int = 256
    heads: int = 8
    head_dim: int = 64
    latent_dim: int = 512
    rope_dim: int = 64
    index_heads: int = 8
    index_dim: int = 128
    top_k: int = 64
    vocabulary: int = 256


Select = Callable[[LatentAttention, LatentInputs, "SequenceShards | None"], Tensor]
"""Returns the sparse_indices of a layer: (B, S, 1, K) int32, padded with -1. With shards, B is 1
and S the tokens of this rank."""


def select_all(
    layer: LatentAttention, inputs: LatentInputs, shards: SequenceShards | None = None
) -> Tensor:
    """Select every key: dense attention. The operators themselves apply the causal mask."""
    batch, length = inputs.query.shape[:2]
    count = length if shards is None else max(shards.lengths)
    keys = torch.arange(count, dtype=torch.int32, device=inputs.query.device)
    return keys.expand(batch, length, 1, count).contiguous()


def select_by_indexer(
    layer: LatentAttention, inputs: LatentInputs, shards: SequenceShards | None = None
) -> Tensor:
    """Select the top-k keys of the layer's lightning indexer: sparse attention."""
    assert inputs.projections is not None
    assert layer.indexer is not None
    if shards is None:
        return layer.indexer.select(inputs.projections, layer.top_k)
    indices, _ = distributed.lightning_indexer(
        *inputs.projections, sparse_count=layer.top_k, layout="BSND", shards=shards
    )
    return indices


def prefetched(inputs: LatentInputs, shards: SequenceShards) -> LatentInputs:
    """With keys that begin to travel to the other ranks, for indexer, attention and loss."""
    assert inputs.projections is not None
    key, latent, key_rope = distributed.prefetch(
        inputs.projections.key_index, inputs.latent, inputs.key_rope, shards=shards, layout="BSND"
    )
    projections = inputs.projections._replace(key_index=key)
    return inputs._replace(projections=projections, latent=latent, key_rope=key_rope)


def attention_of(config: ModelConfig) -> LatentAttention:
    return LatentAttention(
        config.hidden_size, config.heads, head_dim=config.head_dim, rope_dim=config.rope_dim,
        latent_dim=config.latent_dim, index_heads=config.index_heads, index_dim=config.index_dim,
        top_k=config.top_k,
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = attention_of(config)
        self.mlp = nn.Sequential(
            nn.RMSNorm(hidden),
            nn.Linear(hidden, 4 * hidden, bias=False),
            nn.GELU(),
            nn.Linear(4 * hidden, hidden, bias=False),
        )

    def forward(
        self, x: Tensor, select: Select, shards: SequenceShards | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the indexer's mean KL loss over the selected keys.

        With ``shards``, x is (1, local tokens, hidden_size), and the keys are those of all ranks.
        """
        positions = None if shards is None else shards.positions(x.device)
        inputs = self.attention.project(self.attention_norm(x), positions)
        where: Any = {}
        if shards is not None:
            # The same functions, for all tokens or for those of this rank.
            where = {"operators": distributed, "shards": shards, "layout": "BSND"}
            inputs = prefetched(inputs, shards)
        indices = select(self.attention, inputs, shards)
        attended, kl_loss = self.attention.attend(inputs, indices, **where)
        x = x + attended
        return x + self.mlp(x), kl_loss


class SparseLM(nn.Module):
    """Predicts the next byte. ``forward`` returns both losses, in nats per token."""

    NEIGHBOURS = 4

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        # A single byte says little. Each token sees the last few from the start, so that attention
        # is free to look further back.
        self.neighbours = nn.Linear(self.NEIGHBOURS * config.hidden_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)

    def forward(
        self, text: Tensor, select: Select, shards: SequenceShards | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """LM loss and KL loss (mean over layers) of ``text``, (B, S + 1) int64 bytes.

        There is no KL loss in eval mode without gradients.

        With ``shards`` of B sequences of S tokens, every rank passes all of ``text`` and computes
        its own tokens. The losses are those of all tokens, the same on all ranks, and their
        gradients on a rank are what its tokens add to them.
        """
        x, targets = self.embed(text[:, :-1]), text[:, 1:].flatten()
        if shards is not None:
            x, targets = shards.shard(x.flatten(0, 1)).unsqueeze(0), shards.shard(targets)
        kl_losses = []
        for block in self.blocks:
            x, kl_loss = block(x, select, shards)
            kl_losses += [] if kl_loss is None else [kl_loss]
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        if shards is None:
            lm_loss = F.cross_entropy(logits, targets)
        else:
            mine = F.cross_entropy(logits, targets, reduction="sum") / shards.tokens
            total = mine.detach().clone()
            torch.distributed.all_reduce(total, group=shards.group)
            lm_loss = mine + (total - mine.detach())
        return lm_loss, torch.stack(kl_losses).mean() if kl_losses else None

    def embed(self, text: Tensor) -> Tensor:
        """Embed each byte together with the few right before it: (B, S, hidden_size)."""
        x = self.embedding(text)
        padded = F.pad(x, (0, 0, self.NEIGHBOURS - 1, 0))
        return x + self.neighbours(padded.unfold(1, self.NEIGHBOURS, 1).flatten(2))

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of the language model, and those of the indexers."""
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in self.named_parameters():
            groups[".indexer." in name].append(parameter)
        return groups
