"""Calls that torch.npu.NPUGraph captures."""

from __future__ import annotations

from typing import Any

import torch


def captures(device: torch.device) -> bool:
    """Whether calls with tensors of this device become part of a graph, and run later."""
    npu: Any = getattr(torch, "npu", None)
    return (
        device.type == "npu"
        and hasattr(npu, "is_current_stream_capturing")
        and bool(npu.is_current_stream_capturing())
    )
