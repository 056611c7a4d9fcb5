"""The masks of the dense operators."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .randomness import Random

INT32_MAX = 2**31 - 1


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


def inference_mask(
    axes: str, batches: int, rows: tuple[int, int], keys: tuple[int, int], random: Random
) -> Tensor:
    """A full mask of an operator for inference; every third row is masked out.

    axes: "S", "BS", "1S", "B1S" or "11S". rows, keys: how many there are, and how many more the
    mask has, which are masked out.
    """
    leading = {"S": (), "BS": (batches,), "1S": (1,), "B1S": (batches, 1), "11S": (1, 1)}[axes]
    mask = random_mask((*leading, sum(rows), sum(keys)), "rows", random)
    mask[..., rows[0] :, :] = True
    mask[..., keys[0] :] = True
    return mask


def parts_of_id(mode: int, mask: str, larger: tuple[int, int], dtype: torch.dtype,
                band: tuple[int, int]) -> list[str]:  # fmt: skip
    """The parts of the id of an operator for inference that name its mask."""
    parts = [f"mode{mode}"] if mode else []
    parts += [f"mask{mask}"] if mask else []
    parts += [f"larger{larger[0]}x{larger[1]}"] if any(larger) else []
    parts += [str(dtype).removeprefix("torch.")] if mask or mode >= 2 else []
    names = zip(("pre", "next"), band, strict=True)
    return parts + [f"{name}{tokens}" for name, tokens in names if tokens < INT32_MAX]
