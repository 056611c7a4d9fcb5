"""The compressed masks of the dense operators."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def compressed_mask(mode: int, dtype: torch.dtype) -> Tensor:
    """Returns the compressed mask, which is built once: callers must not write to it."""
    mask = torch.ones(2048, 2048).triu(1)
    if mode == 6:
        mask = torch.cat((mask, (torch.arange(2048) >= 1024).float().expand(1024, 2048)))
    return mask.to(dtype)
