"""torch_npu's names where it is not installed.

The stand-in is not left among the modules: other tests look for torch_npu.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from ascend_attn_ops.torch_npu import enable
from ascend_attn_ops.torch_npu.stand_in import StandIn

enable(stand_in=True)
torch_npu: Any = importlib.import_module("torch_npu")
if isinstance(torch_npu, StandIn):
    del sys.modules["torch_npu"]
cann_ops: Any = importlib.import_module("cann_ops_transformer.ops")
if isinstance(cann_ops, StandIn):
    del sys.modules["cann_ops_transformer"], sys.modules["cann_ops_transformer.ops"]

SQUARE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
