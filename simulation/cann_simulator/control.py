"""Lets a test observe and steer the simulated CANN in its process."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor


@cache
def library() -> ctypes.CDLL:
    """The simulated operator library."""
    opapi = ctypes.CDLL("libopapi.so")
    opapi.cann_sim_take_log.restype = ctypes.c_char_p
    opapi.cann_sim_live_handles.restype = ctypes.c_char_p
    return opapi


def synchronize() -> None:
    torch.get_device_module("npu").synchronize()


@contextmanager
def recorded_calls() -> Iterator[list[dict[str, Any]]]:
    """The aclnn calls of the block, in order; the list is filled when the block ends.

    Entries: {"phase": 1, "function", "arguments": {name: value}, "device", "deterministic"},
    {"phase": 2, "function", "stream", "device", "workspace"}, and {"step": name} for the functions
    that torch_npu calls around them.
    """
    calls: list[dict[str, Any]] = []
    synchronize()
    library().cann_sim_start_log()
    try:
        yield calls
        synchronize()
    finally:
        calls += json.loads(library().cann_sim_take_log())


def live_handles() -> dict[str, int]:
    """How many handles of each kind exist now, once the task queue is empty."""
    synchronize()
    counts: dict[str, int] = json.loads(library().cann_sim_live_handles())
    return counts


def waits() -> int:
    """How often the host has waited for a device, or a stream of it, so far."""
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.cann_sim_waits.restype = ctypes.c_int64
    return int(runtime.cann_sim_waits())


@contextmanager
def fail(
    function: str = "",
    phase: int = 1,
    status: int = 561002,
    message: str = "",
    times: int = 1,
    after: int = 0,
) -> Iterator[None]:
    """The next calls of `function` fail in that phase, `times` of them, behind `after` that do not.

    In phase 0 their workspace is too large. In phase 3 the call succeeds and its kernel fails: the
    next wait of the host for a stream or a device has `status`. In phase -1 `function` makes
    handles, such as aclCreateTensor, and gives none.
    """
    library().cann_sim_fail(function.encode(), phase, status, message.encode(), times, after)
    try:
        yield
    finally:
        library().cann_sim_no_faults()


@contextmanager
def listening(in_first_phase: Callable[[str], None]) -> Iterator[None]:
    """First phases call this function with their name, on their thread, once they are logged."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda name: in_first_phase(name.decode()))
    library().cann_sim_listen(callback)
    try:
        yield
        synchronize()
    finally:
        library().cann_sim_listen(None)


@contextmanager
def computing(on: bool) -> Iterator[None]:
    """Whether the second phase computes: off, a call costs its host time alone."""
    library().cann_sim_set_computing(on)
    try:
        yield
    finally:
        library().cann_sim_set_computing(True)


@contextmanager
def keeping_executors() -> Iterator[None]:
    """CANN keeps the executors of attention functions for later calls that are alike."""
    library().cann_sim_set_keeping_executors(True)
    try:
        yield
    finally:
        library().cann_sim_set_keeping_executors(False)


_NUMBER = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double)
_TENSOR = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))  # fmt: skip


@contextmanager
def altered(
    function: str,
    numbers: Mapping[str, Callable[[float], float]] | None = None,
    tensors: Mapping[str, Callable[[Tensor], object]] | None = None,
) -> Iterator[None]:
    """The kernel of a function errs: on other numbers, or in what it writes.

    Args:
        function: The name of the aclnn function.
        numbers: By the name of an argument in the prototype, what the kernel takes its number for,
            or each of its numbers.
        tensors: By the name of an argument, a function that changes the tensor in place when the
            kernel has run.
    """

    def number(of: bytes, name: bytes, value: float) -> float:
        change = (numbers or {}).get(name.decode())
        return float(change(value)) if change and of.decode() == function else value

    def tensor(of: bytes, name: bytes, dlpack: int) -> None:
        view = torch.utils.dlpack.from_dlpack(_capsule(dlpack, b"dltensor", None))
        change = (tensors or {}).get(name.decode())
        if change and of.decode() == function:
            with torch.no_grad():
                change(view)

    callbacks = _NUMBER(number), _TENSOR(tensor)
    library().cann_sim_alter(*callbacks)
    try:
        yield
    finally:
        synchronize()
        library().cann_sim_alter(None, None)


@contextmanager
def unchecked(*harms: str) -> Iterator[None]:
    """Faults of kernels that do such harm raise no error: "bounds", "hang", "results"."""
    before = library().cann_sim_set_unchecked(",".join(harms).encode())
    try:
        yield
        synchronize()
    finally:
        library().cann_sim_restore_unchecked(before)
