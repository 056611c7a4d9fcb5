"""A program written for flash-attn: training, packed training, and decoding with a cache."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from torch import Tensor, nn

HEADS, KEY_HEADS, SIZE, HIDDEN = 4, 2, 64, 96


class MHA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KEY_HEADS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(x).unflatten(-1, (-1, SIZE))
        return qkv.split((HEADS, KEY_HEADS, KEY_HEADS), dim=-2)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, longest: int = 0) -> Tensor:
        q, k, v = self.project(x)
        if cu_seqlens is None:
            out = flash_attn_func(q, k, v, causal=True)
        else:
            out = flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
            )
        return self.out(out.flatten(-2))

    def padded(self, x: Tensor, mask: Tensor) -> Tensor:
        tokens, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
        return pad_input(self(tokens, cu_seqlens, longest), indices, *mask.shape)

    def decode(self, x: Tensor, cache: tuple[Tensor, Tensor], cache_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out = flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=cache_seqlens, causal=True)
        return self.out(out.flatten(-2))


def new_cache(batch: int, length: int) -> tuple[Tensor, Tensor]:
    shape = (batch, length, KEY_HEADS, SIZE)
    return torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
