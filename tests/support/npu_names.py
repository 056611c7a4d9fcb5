"""torch_npu's names where it is not installed, and attention in a few lines of torch.

The stand-in is not left among the modules: other tests look for torch_npu.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from ascend_attn_ops.npu_operators import enable
from ascend_attn_ops.npu_operators.stand_in import StandIn
from torch import Tensor

enable(stand_in=True)
torch_npu: Any = importlib.import_module("torch_npu")
if isinstance(torch_npu, StandIn):
    del sys.modules["torch_npu"]

SQUARE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    scale: float = 1.0,
    bias: Tensor | float = 0.0,
    weight: Tensor | float = 1.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, N, Sq, Dv) and log-sum-exp (B, N, Sq) of (B, N, S, D), in float64. `keep`: True where
    a query sees a key; `weight` multiplies the probabilities. A row without keys: 0 and +inf, or
    the sink, which is the score of one more key, whose value is 0."""
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


def causal(queries: int, keys: int) -> Tensor:
    """Returns a causal mask aligned to the bottom right; True keeps a key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def to_layout(x: Tensor, layout: str) -> Tensor:
    """(B, N, S, D) in another layout."""
    axes = {"BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3), "BSND": (0, 2, 1, 3)}
    y = x.permute(axes.get(layout, (0, 1, 2, 3)))
    return (y.flatten(2) if layout.endswith("H") else y).contiguous()


def from_layout(x: Tensor, layout: str, heads: int) -> Tensor:
    y = x.unflatten(2, (heads, -1)) if layout.endswith("H") else x
    return y.permute({"SBH": (1, 2, 0, 3), "BNSD": (0, 1, 2, 3)}.get(layout, (0, 2, 1, 3)))
