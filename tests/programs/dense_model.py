"""A language model with dense attention, as users write it: causal, grouped heads, packed texts."""

from __future__ import annotations

from collections.abc import Callable

import ascend_attn_ops as ops
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, HIDDEN, HEADS, KEY_HEADS, SIZE = 64, 96, 4, 2, 64


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out, *_ = ops.flash_attention_score(
        query, key, value, num_heads=HEADS, layout="BSND", sparse_mode=3
    )
    return out


def packed_attention(query: Tensor, key: Tensor, value: Tensor, ends: list[int]) -> Tensor:
    out, *_ = ops.flash_attention_score(
        query, key, value, num_heads=HEADS, layout="TND", sparse_mode=3,
        actual_seq_lengths_query=ends, actual_seq_lengths_key=ends,
    )  # fmt: skip
    return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.heads = nn.Linear(HIDDEN, (HEADS + 2 * KEY_HEADS) * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        nn.init.normal_(self.heads.weight, std=0.15)
        nn.init.normal_(self.out.weight, std=0.3)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = self.heads(self.norm(x)).unflatten(-1, (-1, SIZE))
        return heads.split((HEADS, KEY_HEADS, KEY_HEADS), dim=-2)

    def forward(self, x: Tensor, ends: list[int] | None = None) -> Tensor:
        if ends is None:
            out = attention(*self.project(x))
        else:
            out = packed_attention(*self.project(x), ends)
        return x + self.out(out.flatten(-2))


class LanguageModel(nn.Module):
    """Logits of texts (B, S), or of packed texts (T,) with cumulative lengths."""

    def __init__(self, layer: Callable[[], nn.Module], checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, text: Tensor, ends: list[int] | None = None) -> Tensor:
        x = self.embedding(text)
        packed = () if ends is None else (ends,)
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, *packed, use_reentrant=False)
            else:
                x = layer(x, *packed)
        return self.head(x)


class DenseLM(LanguageModel):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__(Layer, checkpoints)


def train_step(model: nn.Module, text: Tensor, ends: list[int] | None = None) -> Tensor:
    """One forward and backward, which trains indexers as well; targets are the texts themselves,
    one token later."""
    logits = model(text) if ends is None else model(text, ends)
    loss = F.cross_entropy(logits.flatten(0, -2).float(), text.roll(-1, -1).flatten())
    loss.backward()
    return loss.detach()
