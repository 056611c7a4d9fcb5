"""flash-attn's functions as documented, in a few lines of torch: expected values for ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .attention import attention


def cu(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(
    cu_q: list[int], cu_k: list[int], key_heads: int = 4, dtype: torch.dtype = torch.float64,
    behind: int = 0, size: int = 24,
) -> list[Tensor]:  # fmt: skip
    """The same query, of 4 heads, key and value each time, with tokens behind the sequences."""
    generator = torch.Generator().manual_seed(len(cu_q))
    sizes = (cu_q[-1] + behind, 4), (cu_k[-1] + behind, key_heads), (cu_k[-1] + behind, key_heads)
    shapes = [(*x, size) for x in sizes]
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def assert_gradients(
    actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], tolerance: float | None = None
) -> None:
    """Compares results and their gradients, these with another tolerance if one is given."""
    torch.testing.assert_close(actual, expected)
    d_out = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(x, leaves, d_out) for x in (actual, expected))
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def assert_as_stated(
    actual: Sequence[Tensor], expected: tuple[Tensor, Tensor], leaves: Sequence[Tensor]
) -> None:
    """Compares out with its gradients, and lse; probabilities, if any, are empty."""
    assert_gradients(actual[0], expected[0], leaves)
    torch.testing.assert_close(actual[1], expected[1])
    assert not any(x.numel() for x in actual[2:])


def in_blocks(sequences: Sequence[Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Returns a cache with the sequences in blocks of any order, otherwise NaN, and its table."""
    counts = [-(-len(x) // size) for x in sequences]
    order = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
    cache = sequences[0].new_full((max(sum(counts), 1), size, *sequences[0].shape[1:]), torch.nan)
    table = torch.full((len(sequences), max(counts) + 1), -1, dtype=torch.int32)
    for row, x in zip(table, sequences, strict=True):
        for i, part in enumerate(x.split(size) if len(x) else ()):
            row[i] = block = next(order)
            cache[block, : len(part)] = part
    return cache, table


def visible(sq: int, skv: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """(seqlen_q, seqlen_k), True where query i sees key j."""
    left, right = window
    d = skv - sq
    i, j = torch.arange(sq)[:, None], torch.arange(skv)
    seen = torch.ones(sq, skv, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i + d - left
    if right >= 0:
        seen &= j <= i + d + right
    if causal:
        seen &= j <= i + d
    return seen


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    alibi_slopes: Tensor | None = None, s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of (batch_size, seqlen, nheads, headdim), in float64 and differentiable.

    A sink is the score of one more key, whose value is 0.
    """
    sq, heads, size = q.shape[1:]
    skv = k.shape[1]
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    bias: Tensor | float = 0.0
    if alibi_slopes is not None:
        distance = (torch.arange(sq)[:, None] + skv - sq - torch.arange(skv)).abs()
        bias = -alibi_slopes.double().expand(len(q), heads)[..., None, None] * distance
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = visible(sq, skv, causal, window_size)
    out, lse = attention(q, k, v, seen, scale, bias, sink=s_aux)
    return out.transpose(1, 2), lse.detach()


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: list[int], cu_seqlens_k: list[int], *,
    alibi_slopes: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence after another: out (total_q, nheads, headdim) and lse (nheads, total_q)."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), torch.inf, dtype=torch.float64)
    outs = []
    spans = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    for b, (of_q, of_k) in enumerate(spans):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        rows, keys = slice(*of_q), slice(*of_k)
        part = q[None, rows], k[None, keys], v[None, keys]
        part_out, part_lse = attend(*part, alibi_slopes=slopes, **options)
        outs.append(part_out[0])
        lse[:, rows] = part_lse[0]
    return torch.cat((*outs, out[cu_seqlens_q[-1] :])), lse
