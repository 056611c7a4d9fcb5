"""The few operators beside attention that models for NPUs call by torch_npu's names.

As on the device, what is computed in between is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops.torch_npu.translation import unsupported


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    x = _wide(input)
    axes = tuple(range(-gamma.dim(), 0))
    rstd = (x.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma).to(input.dtype), rstd


def rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    axes = tuple(range(-gamma.dim(), 0))
    normal, scaled = _wide(input) * rstd, _wide(dy) * gamma
    d_input = rstd * (scaled - normal * (scaled * normal).mean(axes, keepdim=True))
    leading = tuple(range(input.dim() - gamma.dim()))
    d_gamma = _wide(dy) * normal
    return d_input.to(input.dtype), d_gamma.sum(leading) if leading else d_gamma


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = x1 + x2
    out, rstd = rms_norm(input=x, gamma=gamma, epsilon=epsilon)
    return out, rstd, x


def rotary_mul(name: str, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
    x = _wide(input)
    return (x * r1 + _rotated(name, x, rotary_mode) * r2).to(input.dtype)


def rotary_mul_backward(
    name: str, grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = _wide(input), _wide(grad)
    # The rotation by a quarter is orthogonal: its transpose is its negative.
    d_input = dy * r1 - _rotated(name, dy * r2, rotary_mode)
    d_r1, d_r2 = (
        (dy * y).sum_to_size(r.shape).to(r.dtype)
        for y, r in ((x, r1), (_rotated(name, x, rotary_mode), r2))
    )
    return d_input.to(input.dtype), d_r1, d_r2


def swiglu(input: Tensor, dim: int) -> Tensor:
    gate, x = _wide(input).chunk(2, dim)
    return (torch.nn.functional.silu(gate) * x).to(input.dtype)


def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    gate, x = _wide(input).chunk(2, dim)
    dy, sigmoid = _wide(grad_output), gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat((dy * x * (sigmoid + silu * (1 - sigmoid)), dy * silu), dim).to(input.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rotated(name: str, x: Tensor, mode: str) -> Tensor:
    """The pairs of the last axis turned by a quarter: its halves, or neighbours."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    if mode == "interleave":
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    raise unsupported(name, "rotary_mode", "half or interleave", mode)
