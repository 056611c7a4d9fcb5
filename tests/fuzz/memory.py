"""The same values elsewhere in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import torch
from ascend_attn_ops.reference.call import noticed
from support.samples import Sample
from torch import Tensor

# Copies of more take longer than what they would show is worth.
_LARGEST = 2**20


def placed(sample: Sample, random: Random) -> Sample:
    """Each tensor with strides and an offset of its own."""
    kind = random.randrange(3)
    if kind == 0:
        return sample.clone()

    def place(x: Tensor) -> Tensor:
        if x.numel() > _LARGEST:
            return x
        return random.choice(_PLACES)(x, random)

    return sample.map(place)


def permuted(x: Tensor, random: Random) -> Tensor:
    """The axes in another order."""
    order = random.sample(range(x.dim()), x.dim())
    inverse = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


def _narrowed(x: Tensor, random: Random) -> Tensor:
    """A part of something larger, which a kernel must not read."""
    if x.dim() == 0:
        return _shifted(x, random)
    axis = random.randrange(x.dim())
    before, after = random.randint(0, 2), random.randint(0, 2)
    shape = list(x.shape)
    shape[axis] += before + after
    larger = _rubbish(shape, x)
    part = larger.narrow(axis, before, x.shape[axis])
    return part.copy_(x)


def _spaced(x: Tensor, random: Random) -> Tensor:
    """With gaps between the elements."""
    larger = _rubbish([*x.shape, 2], x)
    return larger[..., random.randrange(2)].copy_(x)


def _shifted(x: Tensor, random: Random) -> Tensor:
    """An odd number of elements behind the beginning of its memory."""
    shift = random.choice((1, 3))
    flat = _rubbish([shift + x.numel()], x)
    return flat[shift:].view(x.shape).copy_(x)


_PLACES: tuple[Callable[[Tensor, Random], Tensor], ...] = (
    lambda x, random: x.clone(), permuted, _narrowed, _spaced, _shifted,
)  # fmt: skip


def _rubbish(shape: list[int], x: Tensor) -> Tensor:
    """Returns a value that would be noticed if it were read: NaN, or indices out of range."""
    return torch.full(shape, noticed(x)).to(x.dtype)


def with_expanded(sample: Sample, names: Iterable[str], random: Random) -> Sample:
    """Sometimes replaces tensors by views with a stride of 0 or with overlapping slices."""
    if random.random() < 0.8:
        return sample
    chosen = {id(sample.tensors[name]) for name in names if name in sample.tensors}

    def expand(x: Tensor) -> Tensor:
        if id(x) not in chosen or x.numel() == 0 or random.random() < 0.5:
            return x
        axis = random.randrange(x.dim())
        if random.random() < 0.5:
            return x.narrow(axis, 0, 1).expand(x.shape)
        strides = list(x.stride())
        strides[axis] = random.randint(0, strides[axis])
        return x.as_strided(x.shape, strides)

    return sample.map(expand)
