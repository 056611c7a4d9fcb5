"""Calls of torch_npu's own operators with the arguments of ours."""

from __future__ import annotations

from typing import Any

import torch
from ascend_attn_ops.torch_npu.translation import NAMES
from torch import Tensor


def torch_npu(name: str, arguments: dict[str, Any], **others: Any) -> Any:
    """`others` have the names of their schema, and go before those of ours.

    Raises:
        AttributeError: this torch_npu lacks the operator.
    """
    operator = getattr(torch.ops.npu, name)
    given = {}
    for x in operator.default._schema.arguments:
        ours = NAMES.get(x.name, x.name)
        value = others[x.name] if x.name in others else arguments.get(ours)
        if isinstance(value, Tensor) and "List[int]" in str(x.type):
            value = value.tolist()
        if value is not None:
            given[x.name] = value
    return operator(**given)
