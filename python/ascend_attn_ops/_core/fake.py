"""Fake tensors of the operators with lengths, which may be on the host beside tensors of a device.

FakeTensorMode refuses tensors of two devices unless a function of Python takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import _C
from ascend_attn_ops._core.operators import LENGTHS
from ascend_attn_ops._core.torch_private import FakeTensor


def _register(name: str, overload: str) -> None:
    meta = getattr(getattr(torch.ops.ascend_meta, name), overload)
    full_name = f"ascend::{name}" if overload == "default" else f"ascend::{name}.{overload}"

    def outputs(*args: Any, **kwargs: Any) -> Any:
        # A missing tensor is the operator's error.
        device = next((x.device for x in args if isinstance(x, Tensor)), None)
        for argument, x in kwargs.items():
            if isinstance(x, FakeTensor) and argument in LENGTHS and x.device != device:
                kwargs[argument] = x.to(device)
        return meta(*args, **kwargs)

    torch.library.register_fake(full_name, outputs)


for _name in _C.operators_with_lengths:
    for _overload in getattr(torch.ops.ascend_meta, _name).overloads():
        _register(_name, _overload)
