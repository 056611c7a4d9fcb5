"""The random numbers of a sample, from a seed that its name gives."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


class Random:
    """`normal` draws the same numbers in every dtype, up to rounding."""

    def __init__(self, seed: str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.dtype)

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Finite ones; of an integer dtype, over its whole range."""
        if dtype.is_floating_point:
            return (3 * torch.randn(shape, generator=self.generator)).to(dtype)
        limits = torch.iinfo(dtype)
        x = torch.randint(limits.min, limits.max + 1, shape, generator=self.generator)
        return x.to(dtype)

    def bytes(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Every payload of NaN, both zeros, infinities and subnormal numbers among them."""
        shape = (*shape[:-1], shape[-1] * dtype.itemsize)
        x = torch.randint(256, shape, generator=self.generator, dtype=torch.uint8)
        return x.view(dtype)

    def integer(self, low: int, high: int) -> int:
        """In [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def permutation(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self.generator).tolist()
