"""Dropout masks that seed and offset determine, so that a backward can draw the same again.

The device's generator is Philox, and its masks have other bits. Here a bit is a hash of its
position, by the finalizer of SplitMix64, computed by torch: seed and offset may be tensors, and a
graph may hold all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import has_values

# Elements at a time: as many as stay in the processor's cache.
_CHUNK = 1 << 16
_RANDOM_BITS = 24


def drop_mask(
    scores: int, keep_prob: float, seed: int | Tensor, offset: int | Tensor, device: torch.device
) -> Tensor:
    """One bit per score, 1 with probability `keep_prob`, padded to a multiple of 16 bytes."""
    bits = -(-scores // 128) * 128
    keys = [torch.as_tensor(x, dtype=torch.int64, device=device) for x in (seed, offset)]
    key = _mix(_mix(keys[0].reshape(()) + 1) + keys[1].reshape(()))
    threshold = round(keep_prob * 2**_RANDOM_BITS)
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    parts = []
    # A graph would hold every chunk.
    chunk = _CHUNK if has_values(key) else max(bits, 1)
    for begin in range(0, bits, chunk):
        position = torch.arange(begin, min(begin + chunk, bits), device=device)
        random = _shifted(_mix(position + key), 64 - _RANDOM_BITS)
        keep = (random < threshold).view(-1, 8)
        parts.append((keep * bit).sum(1, dtype=torch.uint8))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _mix(x: Tensor) -> Tensor:
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, as unsigned: torch copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)
