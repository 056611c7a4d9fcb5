"""A language model with DeepSeek Sparse Attention whose indexers learn by their own loss."""

from __future__ import annotations

import ascend_attn_ops as ops
from dense_model import HIDDEN, LanguageModel
from torch import Tensor, nn

HEADS, LATENT, ROPE, KEYS = 32, 512, 64, 1024
SCALE = 192**-0.5


def sparse_attention(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, projections: tuple
) -> tuple[Tensor, Tensor]:
    """The attention's output, and the loss of the indexer."""
    options = {"query_rope": query_rope, "key_rope": key_rope, "scale_value": SCALE}
    keys, _ = ops.lightning_indexer(*projections, sparse_count=KEYS)
    out, *statistics = ops.sparse_flash_attention(query, latent, latent, keys, **options)
    loss = ops.lightning_indexer_kl_loss(
        query, latent, *projections, keys, *statistics, **options, reduction="mean"
    )
    return out, loss


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HEADS * (LATENT + ROPE), bias=False)
        self.key = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.indexer = ops.LightningIndexer(HIDDEN, num_heads=8, head_dim=128, rope_dim=64)
        self.out = nn.Linear(HEADS * LATENT, HIDDEN, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        query = self.query(x).unflatten(-1, (HEADS, LATENT + ROPE))
        key = self.key(x).unsqueeze(-2)
        return *query.split((LATENT, ROPE), -1), *key.split((LATENT, ROPE), -1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out, loss = sparse_attention(*self.project(normed), self.indexer(normed.detach()))
        return x + self.out(ops.attach_loss(out, loss).flatten(-2))


class SparseLM(LanguageModel):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__(Layer, checkpoints)
