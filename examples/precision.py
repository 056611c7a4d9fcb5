"""The dtype in which the examples train."""

from __future__ import annotations

import platform

import torch


def fast_dtype(device: str) -> str:
    """Return "bfloat16", or "float32" on processors where torch is slow in bfloat16.

    Without AVX-512, torch multiplies bfloat16 matrices far slower than float32 ones.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "float32" if device == "cpu" and x86 and not has_avx512 else "bfloat16"


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Compute in `dtype`, "bfloat16" or "float32", with parameters in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
