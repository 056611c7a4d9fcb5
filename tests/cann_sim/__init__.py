"""A simulated CANN for the real torch_npu: see README.md beside this file.

A process uses it when it was started with `environment()`. Within such a process this module
controls the simulation: `recorded_calls`, `live_handles`, `fail`, `computing`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent / "build"
BUILD = ROOT / "lib64"


def package_folder(name: str) -> Path:
    """Where a Python package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name)
    return Path(spec.origin).parent


SOCS = {
    "A2": "Ascend910B2", "A3": "Ascend910_9391", "950": "Ascend950PR_9579", "310P": "Ascend310P3",
}  # fmt: skip
VERSIONS = ("8.5", "9.0", "9.1")

_INDEXER_GRAD = ("aclnnLightningIndexerGrad",)
_SPARSE = (
    "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionGrad", "aclnnLightningIndexer",
    *_INDEXER_GRAD, "aclnnSparseLightningIndexerGradKLLoss",
)  # fmt: skip

# What the libraries of a product, or of one of its releases, lack.
WITHOUT = {
    "without_prompt_v3": ("aclnnPromptFlashAttentionV3",),
    "A3": ("aclnnPromptFlashAttentionV2",),
    "950-8.5": _SPARSE,
    "950-9.0": _SPARSE,
    "950-9.1": _INDEXER_GRAD,
    "310P": (
        *_SPARSE, "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreGradV2",
        "aclnnFlashAttentionVarLenScoreV2", "aclnnFlashAttentionUnpaddingScoreGradV2",
        "aclnnScatterPaKvCache",
    ),
}  # fmt: skip


def library_path(product: str, cann: str, without: str | None = None) -> str:
    """Where the libraries of a product and a release are; `without` names another of WITHOUT."""
    lacking = [without] if without else [x for x in (product, f"{product}-{cann}") if x in WITHOUT]
    return ":".join(str(path) for path in [*(ROOT / x for x in lacking), BUILD])


def environment(
    task_queue: int = 1, product: str = "A2", cann: str = "9.1", without: str | None = None
) -> dict[str, str]:
    """What the environment of a process must hold, from its start, to run on the simulation."""
    path = os.environ.get("LD_LIBRARY_PATH")
    ours = library_path(product, cann, without)
    return {
        "LD_LIBRARY_PATH": f"{ours}:{path}" if path else ours,
        "ASCEND_HOME_PATH": str(ROOT),
        "ASCEND_OPP_PATH": str(ROOT / "opp"),
        "TASK_QUEUE_ENABLE": str(task_queue),
        "CANN_SIM_SOC": SOCS[product],
        "CANN_SIM_VERSION": cann,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libopapi.so")
    library.cann_sim_take_log.restype = ctypes.c_char_p
    library.cann_sim_live_handles.restype = ctypes.c_char_p
    return library


@contextmanager
def recorded_calls() -> Iterator[list[dict[str, Any]]]:
    """The aclnn calls of the block, in order; the list is filled when the block ends.

    Entries: {"phase": 1, "function", "arguments": {name: value}, "device", "deterministic"},
    {"phase": 2, "function", "stream", "device", "workspace"}, and {"step": name} for the functions
    that torch_npu calls around them.
    """
    import torch

    calls: list[dict[str, Any]] = []
    torch.get_device_module("npu").synchronize()
    _library().cann_sim_start_log()
    try:
        yield calls
        torch.get_device_module("npu").synchronize()
    finally:
        calls += json.loads(_library().cann_sim_take_log())


def live_handles() -> dict[str, int]:
    """How many handles of each kind exist now, once the task queue is empty."""
    import torch

    torch.get_device_module("npu").synchronize()
    counts: dict[str, int] = json.loads(_library().cann_sim_live_handles())
    return counts


def waits() -> int:
    """How often the host has waited for a device, or a stream of it, so far."""
    library = ctypes.CDLL("libascendcl.so")
    library.cann_sim_waits.restype = ctypes.c_int64
    return int(library.cann_sim_waits())


@contextmanager
def fail(
    function: str = "", phase: int = 1, status: int = 561002, message: str = "", times: int = 1
) -> Iterator[None]:
    """The next calls of `function` fail in that phase; in phase 0 their workspace is too large."""
    _library().cann_sim_fail(function.encode(), phase, status, message.encode(), times)
    try:
        yield
    finally:
        _library().cann_sim_no_faults()


@contextmanager
def computing(on: bool) -> Iterator[None]:
    """Whether the second phase computes: off, a call costs its host time alone."""
    _library().cann_sim_set_computing(on)
    try:
        yield
    finally:
        _library().cann_sim_set_computing(True)


@contextmanager
def keeping_executors() -> Iterator[None]:
    """CANN keeps the executors of attention functions for later calls that are alike."""
    _library().cann_sim_set_keeping_executors(True)
    try:
        yield
    finally:
        _library().cann_sim_set_keeping_executors(False)


def bare_call_microseconds(operator: str, calls: int) -> float:
    """The two phases of the operator's aclnn function with their tensors, without PyTorch."""
    call = getattr(_library(), f"cann_sim_bare_{operator}")
    call.restype = ctypes.c_double
    return float(call(calls))
