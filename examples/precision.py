"""The dtype in which the examples train."""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch.nn import functional as F


def dtype_of(device: str, tokens: int, width: int) -> str:
    """Return "bfloat16", or "float32" on a CPU that is faster in it.

    Instructions alone do not tell: on some processors that have bfloat16 products, they are slower.
    So this times a product of a model's MLP, of `tokens` in a batch and of its `width`.
    """
    if device != "cpu":
        return "bfloat16"
    if "WORLD_SIZE" in os.environ:
        return "float32"  # ranks that time for themselves may disagree
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(tokens, width, dtype=dtype)
        weight = torch.ones(4 * width, width, dtype=dtype)
        F.linear(x, weight)  # the first call chooses a kernel
        times = []
        for _ in range(20):
            start = time.perf_counter()
            F.linear(x, weight)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return "float32" if seconds[torch.float32] < 0.9 * seconds[torch.bfloat16] else "bfloat16"


def add_dtype(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"],
        help="of activations and products. Default: on a CPU the faster one, which is timed, and "
        "float32 for several ranks; bfloat16 on an NPU; with --resume that of the checkpoint",
    )  # fmt: skip


def choose_dtype(arguments: argparse.Namespace, saved: str | None) -> str:
    """Return what --dtype, the checkpoint to resume from, or the device says."""
    # The NPU's limits, which apply to its shapes, exclude float32.
    device = "npu" if arguments.device_shapes else arguments.device
    tokens = arguments.batch_size * arguments.sequence_length
    return arguments.dtype or saved or dtype_of(device, tokens, arguments.hidden_size)


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Compute in `dtype`, "bfloat16" or "float32", with parameters in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
