"""The masks of the dense operators."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .randomness import Random

if TYPE_CHECKING:
    from .flash_attention_score import FlashCase


@cache
def compressed_mask(mode: int, dtype: torch.dtype) -> Tensor:
    """Returns the compressed mask, which is built once: callers must not write to it."""
    mask = torch.ones(2048, 2048).triu(1)
    if mode == 6:
        mask = torch.cat((mask, (torch.arange(2048) >= 1024).float().expand(1024, 2048)))
    return mask.to(dtype)


def full_mask(case: FlashCase, random: Random) -> Tensor:
    """Returns a mask by `case.pattern`: random, rows (every third is masked out) or causal."""
    sq, skv = (max(x) for x in zip(*case.sequences, strict=True)) if case.sequences else case.s
    batch = len(case.sequences)
    leading: tuple[int, ...] = {
        "BN": (batch, case.heads[0]),
        "B1": (batch, 1),
        "11": (1, 1),
    }.get(case.mask, ())
    if case.mask == "sum":
        sq, skv = (sum(x) for x in case.lengths)
    shape = (*leading, sq, skv)
    if case.mode == 5:
        assert case.prefix is not None
        i, j = torch.arange(sq)[:, None], torch.arange(skv)
        keep = (j < torch.tensor(case.prefix).view(-1, 1, 1, 1)) | (j <= i + skv - sq)
        return (~keep).expand(shape).to(case.mask_dtype)
    mask = torch.rand(shape, generator=random.generator) < 0.3
    if case.pattern == "rows":
        mask[..., ::3, :] = True
    if case.pattern == "causal":
        mask |= torch.ones(sq, skv, dtype=torch.bool).triu(1)
    return mask.to(case.mask_dtype)
