"""Attention as its public definition says it, in plain torch: what torch_npu's operators owe."""

from __future__ import annotations

import pytest
import support.attention
import torch
import torch_npu
from support.tolerance import Tolerance
from torch import Tensor

# Half types round the probabilities, which the sums then carry.
TOLERANCES = {
    torch.float16: Tolerance(rtol=2**-9, of_largest=2**-9),
    torch.bfloat16: Tolerance(rtol=2**-7, of_largest=2**-7),
    torch.float32: Tolerance(rtol=1e-5, of_largest=1e-5),
}


def takes(operator: str, argument: str) -> pytest.MarkDecorator:
    """Skips a test of an argument that an older torch_npu does not have."""
    arguments = getattr(torch.ops.npu, operator).default._schema.arguments
    return pytest.mark.skipif(
        argument not in [x.name for x in arguments],
        reason=f"{operator} of torch_npu {torch_npu.__version__} has no {argument}",
    )


def values(*shape: int, seed: int = 0) -> Tensor:
    """Returns random float64 values, so that every dtype rounds the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def statistics(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    kept: Tensor | None = None,
    inner_bias: Tensor | None = None,
    outer_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - max), max and sum of (B, N, Sq, D) and (B, Nk, Skv, D); `kept` is a mask."""
    scores = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).mT
    if inner_bias is not None:
        scores = scores + inner_bias
    scores = scores * scale
    if outer_bias is not None:
        scores = scores + outer_bias
    if kept is not None:
        scores = scores.masked_fill(~kept, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.view(-1, 1, 1))
    finite = top.clamp(min=torch.finfo(top.dtype).min).detach()
    exponentials = (scores - finite).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.view(-1, 1, 1) - finite).exp()
    return exponentials, top, total


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    kept: Tensor | None = None,
    inner_bias: Tensor | float = 0.0,
    outer_bias: Tensor | float = 0.0,
    sinks: Tensor | None = None,
    drop: Tensor | float = 1.0,
) -> Tensor:
    """(B, N, Sq, Dv), 0 in rows without keys. `drop` multiplies the probabilities."""
    bias = inner_bias * scale + outer_bias
    return support.attention.attention(q, k, v, kept, scale, bias, drop, sinks)[0]


def log_sum_exp(q: Tensor, k: Tensor, *, scale: float, **options: Tensor | None) -> Tensor:
    """(B, N, Sq, 1)."""
    _, top, total = statistics(q, k, scale=scale, **options)
    return top + total.log()


def kept_by_mode(
    sparse_mode: int, queries: int, keys: int, *, pre: int = 0, next: int = 0, prefix: int = 0
) -> Tensor:
    """Returns the keys that a mode keeps; pre and next count for the band alone."""
    i, j = torch.arange(queries).view(-1, 1), torch.arange(keys)
    to_the_corner = keys - queries
    match sparse_mode:
        case 2:
            return j <= i
        case 3:
            return j <= i + to_the_corner
        case 4:
            return (j >= i + to_the_corner - pre) & (j <= i + to_the_corner + next)
        case 5 | 6:
            return (j < prefix) | (j <= i + to_the_corner)
    raise ValueError(sparse_mode)


def compressed_mask(sparse_mode: int) -> Tensor:
    """Returns the mask that the device reads instead of the whole one; 1 masks a key out."""
    causal = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    if sparse_mode != 6:
        return causal
    return torch.cat([causal, (torch.arange(2048) >= 1024).expand(1024, -1)])
