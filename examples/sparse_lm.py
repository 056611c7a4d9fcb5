"""A byte-level language model with DeepSeek Sparse Attention, built on this library's operators.

Attention is absorbed MLA: each token stores ONE latent (and a small rotary key) that serves all
heads as both key and value; per-head projections are folded into the query and the output. A
``Select`` function decides which stored tokens a query attends to: all of them, those that the
lightning indexer prefers, or any other selection to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ascend_attn_ops as ops
import torch
import torch.distributed
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from ascend_attn_ops.nn.lightning_indexer import (
    IndexerProjections,
    LightningIndexer,
    rotary_embedding,
)
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


class AttentionInputs(NamedTuple):
    """Inputs of the attention and the indexer, for B sequences of S tokens and N heads."""

    query: Tensor  # (B, S, N, latent_dim)
    query_rope: Tensor  # (B, S, N, rope_dim)
    latent: Tensor  # (B, S, 1, latent_dim), key and value
    key_rope: Tensor  # (B, S, 1, rope_dim)
    projections: IndexerProjections
    # Which tokens these are, if ranks share the sequences: B is 1 then, and S the local tokens.
    shards: SequenceShards | None = None

    def prefetched(self, shards: SequenceShards) -> AttentionInputs:
        """With keys that begin to travel to the other ranks, for indexer, attention and loss."""
        key, latent, key_rope = distributed.prefetch(
            self.projections.key_index, self.latent, self.key_rope, shards=shards, layout="BSND"
        )
        projections = self.projections._replace(key_index=key)
        return self._replace(projections=projections, latent=latent, key_rope=key_rope)


Select = Callable[["LatentAttention", AttentionInputs], Tensor]
"""Returns the sparse_indices of a layer: (B, S, 1, K) int32, padded with -1."""


def select_all(layer: LatentAttention, inputs: AttentionInputs) -> Tensor:
    """Select every key: dense attention. The operators themselves apply the causal mask."""
    batch, length = inputs.query.shape[:2]
    count = length if inputs.shards is None else max(inputs.shards.lengths)
    keys = torch.arange(count, dtype=torch.int32, device=inputs.query.device)
    return keys.expand(batch, length, 1, count).contiguous()


def select_by_indexer(layer: LatentAttention, inputs: AttentionInputs) -> Tensor:
    """Select the top-k keys of the layer's lightning indexer: sparse attention."""
    if inputs.shards is None:
        return layer.indexer.select(inputs.projections, layer.top_k)
    indices, _ = distributed.lightning_indexer(
        *inputs.projections, sparse_count=layer.top_k, layout="BSND", shards=inputs.shards
    )
    return indices


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.top_k = config.heads, config.top_k
        self.widths = (config.head_dim, config.rope_dim)
        self.kv_widths = (config.latent_dim, config.rope_dim)
        self.scale = sum(self.widths) ** -0.5
        hidden, heads, width = config.hidden_size, config.heads, config.head_dim
        self.query = nn.Linear(hidden, heads * sum(self.widths), bias=False)
        self.latent = nn.Linear(hidden, sum(self.kv_widths), bias=False)
        self.latent_norm = nn.RMSNorm(config.latent_dim)
        self.absorbed_key = nn.Parameter(torch.empty(heads, width, config.latent_dim))
        self.absorbed_value = nn.Parameter(torch.empty(heads, config.latent_dim, width))
        self.out = nn.Linear(heads * width, hidden, bias=False)
        self.indexer = LightningIndexer(
            hidden,
            num_heads=config.index_heads,
            head_dim=config.index_dim,
            rope_dim=config.index_dim // 2,
        )
        for weight in (self.absorbed_key, self.absorbed_value):
            nn.init.normal_(weight, std=config.latent_dim**-0.5)

    def project(self, x: Tensor, positions: Tensor | None = None) -> AttentionInputs:
        """Project hidden states (B, S, hidden_size) to the inputs of attention and indexer.

        ``positions`` are (B, S); the default is 0, 1, 2, ...
        """
        query = self.query(x).unflatten(-1, (self.heads, sum(self.widths)))
        query, query_rope = query.split(self.widths, dim=-1)
        latent, key_rope = self.latent(x).unsqueeze(-2).split(self.kv_widths, dim=-1)
        return AttentionInputs(
            query=torch.einsum("bsnd,ndl->bsnl", query, self.absorbed_key),
            query_rope=rotary_embedding(query_rope, positions),
            latent=self.latent_norm(latent.float()).to(latent.dtype),
            key_rope=rotary_embedding(key_rope, positions),
            # The indexer imitates the attention and must not influence the hidden states.
            projections=self.indexer(x.detach(), positions),
        )

    def forward(
        self, x: Tensor, select: Select, shards: SequenceShards | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over the selected keys, and the indexer's mean KL loss over the same keys.

        With ``shards``, x is (1, local tokens, hidden_size), and the keys are those of all ranks.
        """
        positions = None if shards is None else shards.positions(x.device)
        inputs = self.project(x, positions)._replace(shards=shards)
        if shards is not None:
            inputs = inputs.prefetched(shards)
        query, query_rope, latent, key_rope, projections, _ = inputs
        indices = select(self, inputs)
        # The same functions, for all tokens or for those of this rank.
        operators: Any = ops if shards is None else distributed
        where: Any = {} if shards is None else {"shards": shards, "layout": "BSND"}
        attended, softmax_max, softmax_sum = operators.sparse_flash_attention(
            query, latent, latent, indices,
            scale_value=self.scale, query_rope=query_rope, key_rope=key_rope, **where,
        )  # fmt: skip
        kl_loss = operators.lightning_indexer_kl_loss(
            query, latent, *projections, indices,
            softmax_max=softmax_max, softmax_sum=softmax_sum, scale_value=self.scale,
            query_rope=query_rope, key_rope=key_rope, reduction="mean", **where,
        )  # fmt: skip
        values = torch.einsum("bsnl,nld->bsnd", attended, self.absorbed_value)
        return self.out(values.flatten(-2)), kl_loss


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = LatentAttention(config)
        self.mlp = nn.Sequential(
            nn.RMSNorm(hidden),
            nn.Linear(hidden, 4 * hidden, bias=False),
            nn.GELU(),
            nn.Linear(4 * hidden, hidden, bias=False),
        )

    def forward(
        self, x: Tensor, select: Select, shards: SequenceShards | None = None
    ) -> tuple[Tensor, Tensor]:
        attended, kl_loss = self.attention(self.attention_norm(x), select, shards)
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
    ) -> tuple[Tensor, Tensor]:
        """LM loss and KL loss (mean over layers) of ``text``, (B, S + 1) int64 bytes.

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
            kl_losses.append(kl_loss)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        if shards is None:
            lm_loss = F.cross_entropy(logits, targets)
        else:
            mine = F.cross_entropy(logits, targets, reduction="sum") / shards.tokens
            total = mine.detach().clone()
            torch.distributed.all_reduce(total, group=shards.group)
            lm_loss = mine + (total - mine.detach())
        return lm_loss, torch.stack(kl_losses).mean()

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
