"""Loads the two shared objects: `_C` always, `_npu` where torch_npu can be imported."""

from __future__ import annotations

import importlib
import importlib.util

# Why the NPU kernels are not loaded; None when they are.
npu_unavailable: str | None = "not loaded yet"


def load() -> None:
    """Register the operators; say in `npu_unavailable` why those for the NPU are missing."""
    global npu_unavailable
    importlib.import_module("ascend_attn_ops._C")
    npu_unavailable = _load_npu()


def _load_npu() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install --no-deps torch_npu, then install again"
    if importlib.util.find_spec("ascend_attn_ops._npu") is None:
        return (
            "built without torch_npu: install ascend_attn_ops again, with --no-build-isolation, "
            "in the environment that has torch_npu"
        )
    try:
        importlib.import_module("torch_npu")
        importlib.import_module("ascend_attn_ops._npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        return f"torch_npu cannot be loaded: {reason[0] if reason else type(error).__name__}"
    return None
