"""Attention in a few lines of torch, in float64 and differentiable: expected values for ours."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None = None, scale: float = 1.0,
    bias: Tensor | float = 0.0, weight: Tensor | float = 1.0, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out (B, N, Sq, Dv) and the log-sum-exp (B, N, Sq) of tensors in (B, N, S, D).

    `keep` is True where a query sees a key; `weight` multiplies the probabilities. A sink is the
    score of one more key, whose value is 0. Without a key or a sink a row is 0, and its
    log-sum-exp +inf.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.mT * scale + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    lse = scores.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None])
    some = lse > -torch.inf
    weights = (scores - torch.where(some, lse, 0)[..., None]).exp() * weight
    return weights @ value, torch.where(some, lse, torch.inf)


def qkv(queries: int, keys: int, key_heads: int = 4) -> list[Tensor]:
    """Returns the same query, key and value in BNSD each time: two batches of 4 heads of 16."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, queries, 16), (2, key_heads, keys, 16), (2, key_heads, keys, 16)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def causal(queries: int, keys: int) -> Tensor:
    """Returns a causal mask aligned to the bottom right; True keeps a key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def to_layout(x: Tensor, layout: str) -> Tensor:
    """(B, N, S, D) in another layout; in TND, one batch after another."""
    axes = {"BNSD": (0, 1, 2, 3), "SBH": (2, 0, 1, 3)}.get(layout, (0, 2, 1, 3))
    y = x.permute(axes)
    if layout == "TND":
        return y.flatten(0, 1)
    return (y.flatten(2) if layout.endswith("H") else y).contiguous()


def from_layout(x: Tensor, layout: str, heads: int) -> Tensor:
    y = x.unflatten(2, (heads, -1)) if layout.endswith("H") else x
    return y.permute({"SBH": (1, 2, 0, 3), "BNSD": (0, 1, 2, 3)}.get(layout, (0, 2, 1, 3)))
