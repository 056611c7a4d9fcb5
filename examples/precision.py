"""The dtype in which the examples train."""

from __future__ import annotations

import argparse
import platform

import torch


def fast_dtype(device: str) -> str:
    """Return "bfloat16", or "float32" on processors where torch is slow in bfloat16.

    Without AVX-512, torch multiplies bfloat16 matrices far slower than float32 ones.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "float32" if device == "cpu" and x86 and not has_avx512 else "bfloat16"


def add_dtype(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"],
        help="of activations and products. Default: bfloat16; float32 on a CPU without AVX-512, "
        "where torch is slow in bfloat16",
    )  # fmt: skip


def dtype_of(arguments: argparse.Namespace) -> str:
    """Return what --dtype, --device and --device-shapes say."""
    # The NPU's limits, which apply to its shapes, exclude float32.
    default = "bfloat16" if arguments.device_shapes else fast_dtype(arguments.device)
    return arguments.dtype or default


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Compute in `dtype`, "bfloat16" or "float32", with parameters in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
