"""Nothing is left of calls: of many, of those of other tests (no_leak), of the faulty ones."""

from __future__ import annotations

import ctypes
import gc
from typing import ClassVar

import cann_simulator
import pytest
import torch
from device_samples import first
from support.simulated_npu import run_in_new_process


class _MallocStatistics(ctypes.Structure):
    """struct mallinfo2 of the C library."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def bytes_in_use() -> int:
    """Returns the bytes that malloc has handed out; exact, unlike the size of the process."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocStatistics
    return mallinfo().uordblks


def growth() -> list[int]:
    """Returns by how much many calls grow the memory of the host and of the device."""
    sample = first("sparse_flash_attention_grad").make(torch.bfloat16).to("npu")

    def run(calls: int) -> tuple[int, int]:
        for _ in range(calls):
            sample.call(torch.ops.ascend)
        torch.npu.synchronize()
        gc.collect()
        return bytes_in_use(), torch.npu.memory_allocated()

    with cann_simulator.computing(False):
        handles = cann_simulator.live_handles()
        # The places of the task queue are filled for the first time.
        before = run(6_000)
        after = run(10_000)
        assert cann_simulator.live_handles() == handles
    return [after[0] - before[0], after[1] - before[1]]


def test_many_calls_do_not_grow_memory() -> None:
    out, _ = run_in_new_process("import test_npu_handles as x\nprint(*x.growth())")
    host, device = map(int, out.split())
    # Less than ten bytes per call.
    assert host < 100_000
    assert device == 0


@pytest.mark.usefixtures("no_leak")
def test_rejected_before_the_device() -> None:
    """Our checks come first: nothing is made."""
    sample = first("sparse_flash_attention").make(torch.bfloat16).to("npu")
    with cann_simulator.recorded_calls() as log, pytest.raises(TypeError, match="161002"):
        sample.replace(key=sample.inputs["key"].half()).call(torch.ops.ascend)
    assert not [entry for entry in log if "SparseFlash" in entry.get("function", "")]
