"""sparse_flash_attention and its gradient against plain torch.

    python benchmarks/sparse_flash_attention.py

Each query token selects K of the keys before it at random; value is key. Every implementation
computes what the operator returns; FLOPs are counted for the selected pairs only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from harness import Benchmark, causal_selection, kept, name_of
from torch import Tensor

OURS = torch.ops.ascend
D, ROPE = 512, 64
SCALE = 192**-0.5  # DeepSeek-V3.2, with heads of 128 + 64 before absorption


@dataclass(frozen=True)
class Shape:
    tokens: int
    selected: int
    heads: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"S={self.tokens} K={self.selected} N1={self.heads} {name_of(self.dtype)}"

    def pairs(self) -> int:
        """Return the number of selected token-key pairs; causal, so early tokens have fewer."""
        return sum(min(self.selected, token + 1) for token in range(self.tokens))

    def forward_flops(self) -> int:
        return 2 * self.heads * self.pairs() * (2 * D + ROPE)

    def backward_flops(self) -> int:
        return 2 * self.heads * self.pairs() * (5 * D + 3 * ROPE)


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    query_rope: Tensor
    key: Tensor  # and value
    key_rope: Tensor
    sparse_indices: Tensor
    d_out: Tensor

    @staticmethod
    def random(shape: Shape) -> Inputs:
        torch.manual_seed(0)
        s, n = shape.tokens, shape.heads

        def normal(*sizes: int) -> Tensor:
            return torch.randn(1, *sizes).to(shape.dtype)

        return Inputs(
            query=normal(s, n, D),
            query_rope=normal(s, n, ROPE),
            key=normal(s, 1, D),
            key_rope=normal(s, 1, ROPE),
            sparse_indices=causal_selection(s, shape.selected),
            d_out=normal(s, n, D),
        )


Forward = tuple[Tensor, Tensor, Tensor]


def forward_of(x: Inputs) -> Forward:
    outputs: Forward = OURS.sparse_flash_attention(
        x.query, x.key, x.key, x.sparse_indices, scale_value=SCALE,
        query_rope=x.query_rope, key_rope=x.key_rope,
    )  # fmt: skip
    return outputs


def backward_of(x: Inputs, forward: Forward) -> object:
    return OURS.sparse_flash_attention_grad(
        x.query, x.key, x.key, x.sparse_indices, x.d_out, *forward, scale_value=SCALE,
        query_rope=x.query_rope, key_rope=x.key_rope,
    )  # fmt: skip


class PlainTorch:
    """The formulas of both operators; subclasses choose the keys that each token multiplies."""

    def __init__(self, x: Inputs) -> None:
        self.query = torch.cat((x.query, x.query_rope), -1)[0]
        self.all_keys = torch.cat((x.key, x.key_rope), -1)[0, :, 0]
        self.indices = x.sparse_indices[0, :, 0].long()
        self.d_out = x.d_out[0]

    def keys(self) -> tuple[Tensor, Tensor]:
        """Return the keys of each token, (S or 1, n, D + Dr), and which of them count, (S, n)."""
        raise NotImplementedError

    def sum_by_key(self, by_token: Tensor, rows: Tensor) -> Tensor:
        """Sum over tokens and heads, per key: (S, N, n) and (S, N, size) to (keys, size)."""
        raise NotImplementedError

    def probabilities(self, keys: Tensor, counts: Tensor) -> Tensor:
        scores = (self.query @ keys.mT).float() * SCALE
        return scores.masked_fill_(~counts[:, None], -torch.inf).softmax(-1)

    def forward(self) -> Tensor:
        keys, counts = self.keys()
        return self.probabilities(keys, counts).to(keys.dtype) @ keys[..., :D]

    def backward(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, counts = self.keys()
        p = self.probabilities(keys, counts)
        d_p = (self.d_out @ keys[..., :D].mT).float()
        delta = (self.d_out.float() * out[0].float()).sum(-1, keepdim=True)
        d_s = (p * (d_p - delta)).to(keys.dtype)
        d_query = d_s @ keys * SCALE
        d_key = self.sum_by_key(d_s, self.query) * SCALE
        d_value = self.sum_by_key(p.to(keys.dtype), self.d_out)
        return d_query, d_key.to(keys.dtype), d_value.to(keys.dtype)


class Gathering(PlainTorch):
    """Copies the selected keys of every token side by side."""

    def keys(self) -> tuple[Tensor, Tensor]:
        return self.all_keys[self.indices.clamp(min=0)], self.indices >= 0

    def sum_by_key(self, by_token: Tensor, rows: Tensor) -> Tensor:
        sums = torch.zeros(len(self.all_keys), rows.shape[-1])
        parts = (by_token.mT @ rows).flatten(0, 1).float()
        return sums.index_add_(0, self.indices.clamp(min=0).flatten(), parts)


class Masking(PlainTorch):
    """Computes all pairs of tokens and masks out those that are not selected."""

    def keys(self) -> tuple[Tensor, Tensor]:
        return self.all_keys, kept(self.indices, len(self.all_keys))

    def sum_by_key(self, by_token: Tensor, rows: Tensor) -> Tensor:
        return by_token.flatten(0, 1).mT @ rows.flatten(0, 1)


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5)
    shapes = [Shape(1024, 256), Shape(1024, 256, dtype=torch.float16)]
    for shape in (*shapes, *(Shape(tokens, 256) for tokens in (2048, 4096, 8192))):
        x = Inputs.random(shape)
        forward = forward_of(x)
        peers = {"gathering": Gathering(x), "masking": Masking(x)} if shape == shapes[0] else {}
        run.measure(
            f"sparse_flash_attention {shape}", partial(forward_of, x),
            {f"torch, {name}": peer.forward for name, peer in peers.items()},
            shape.forward_flops(),
        )  # fmt: skip
        run.measure(
            f"sparse_flash_attention_grad {shape}", partial(backward_of, x, forward),
            {f"torch, {name}": partial(x.backward, forward[0]) for name, x in peers.items()},
            shape.backward_flops(),
        )  # fmt: skip


if __name__ == "__main__":
    main()
