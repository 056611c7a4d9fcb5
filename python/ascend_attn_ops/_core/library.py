"""Loads the NPU kernels if torch_npu can be imported; importing `_C` registers all others."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

import torch

from ascend_attn_ops import _C
from ascend_attn_ops._core import built_with, npu_graphs, value_checks
from ascend_attn_ops._core.arguments import first_line
from ascend_attn_ops._core.device_limits import apply_environment

# A part of the error of a call whose aclnn function CANN's libraries lack.
LACKS = "is not in this CANN"

# Stands in for the NPU kernels while they cannot be loaded.
_without_npu: torch.library.Library | None = None

# Why the NPU kernels are not loaded; None when they are.
npu_unavailable: str | None = "not loaded yet"


def load() -> None:
    """Register the NPU kernels, or set `npu_unavailable`; apply the environment variables.

    It can be called again: a CANN, such as a simulated one, can become available after this package
    was imported.
    """
    global npu_unavailable, _without_npu
    _C.check_cpu_capability()
    npu_unavailable = _load_npu()
    if _without_npu is not None:
        _without_npu._destroy()
        _without_npu = None
    if npu_unavailable:
        _without_npu = _explaining_on_npu_tensors(npu_unavailable)
    value_checks.apply_environment()
    apply_environment()  # last: it overrules the NPU in use


def npu_module() -> ModuleType | None:
    """Return the module with the NPU kernels, if it is loaded."""
    return None if npu_unavailable else importlib.import_module("ascend_attn_ops._npu")


def _explaining_on_npu_tensors(reason: str) -> torch.library.Library:
    """Make calls with NPU tensors say what is missing, instead of falling back to the CPU."""
    library = torch.library.Library("ascend", "IMPL", "PrivateUse1")
    for row in _C.limits_table():
        operator = row["operator"]
        packet = getattr(torch.ops.ascend, operator)

        def explain(*args: Any, operator: str = operator, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(
                f"ascend::{operator}: device: expected the NPU kernels to be loaded, got {reason}"
            )

        for overload in packet.overloads():
            library.impl(getattr(packet, overload), explain)
    return library


def _load_npu() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install --no-deps torch_npu, then install again"
    reason = built_with.mismatch("_npu")
    if importlib.util.find_spec("ascend_attn_ops._npu") is None:
        reason = (
            "built without torch_npu: install ascend_attn_ops again, with --no-build-isolation, "
            "in the environment that has torch_npu"
        )
    if reason and not built_with.autoloads:
        return reason
    try:
        if "torch_npu" not in sys.modules:
            # An import of torch_npu that fails for want of CANN leaves half of it behind.
            ctypes.CDLL("libascendcl.so")
        importlib.import_module("torch_npu")
    # A broken one raises anything, and the operators on the CPU do not need it.
    except (Exception, SystemExit) as error:
        return reason or f"torch_npu cannot be loaded: {first_line(error)}"
    if reason:
        return reason
    try:
        importlib.import_module("ascend_attn_ops._npu")
    except Exception as error:
        # Post releases of one torch_npu may export different functions.
        return built_with.difference("_npu") or f"_npu cannot be loaded: {first_line(error)}"
    npu_graphs.register_handlers()
    return None
