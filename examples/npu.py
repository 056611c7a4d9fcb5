"""The option --device npu of the examples."""

from __future__ import annotations

import importlib
import sys

import torch


def register_npu() -> None:
    """Register the device in torch, or end and say what is missing."""
    version = torch.__version__.partition("+")[0]
    needs = (
        f"--device npu needs torch_npu (pip install 'torch_npu=={version}.*'), CANN (source its "
        "set_env.sh) and an Ascend NPU; `python -m ascend_attn_ops` reports what works here"
    )
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        sys.exit(f"{needs}\n{type(error).__name__}: {error}")
    if not torch.get_device_module("npu").is_available():
        sys.exit(f"{needs}\ntorch_npu sees no NPU: torch.npu.is_available() is False")
