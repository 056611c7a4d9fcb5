"""The masks of the dense operators."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .randomness import Random


@cache
def compressed_mask(mode: int, dtype: torch.dtype) -> Tensor:
    """Returns the compressed mask, which is built once: callers must not write to it."""
    mask = torch.ones(2048, 2048).triu(1)
    if mode == 6:
        mask = torch.cat((mask, (torch.arange(2048) >= 1024).float().expand(1024, 2048)))
    return mask.to(dtype)


def prefix_mask(shape: tuple[int, ...], prefix: tuple[int, ...]) -> Tensor:
    """Returns a causal mask, aligned at the end, beside which each batch sees its first keys."""
    sq, skv = shape[-2:]
    i, j = torch.arange(sq)[:, None], torch.arange(skv)
    keep = (j < torch.tensor(prefix).view(-1, 1, 1, 1)) | (j <= i + skv - sq)
    return (~keep).expand(shape)


def random_mask(shape: tuple[int, ...], pattern: str, random: Random) -> Tensor:
    """Returns a mask by `pattern`: random, rows (every third is masked out) or causal."""
    mask = torch.rand(shape, generator=random.generator) < 0.3
    if pattern == "rows":
        mask[..., ::3, :] = True
    if pattern == "causal":
        mask |= torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    return mask
