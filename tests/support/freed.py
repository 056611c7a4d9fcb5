"""Tensors whose memory is gone, as FSDP leaves them."""

from __future__ import annotations

from torch import Tensor


def freed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x
