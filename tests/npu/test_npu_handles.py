"""Every handle is given back: after success, after each kind of failure, and after many calls."""

from __future__ import annotations

import ctypes
import gc
import re
from itertools import product
from typing import Any, ClassVar

import cann_simulator
import pytest
import torch
from device_samples import DEVICE_RECIPES, first
from support.samples import Recipe, Sample
from support.simulated_npu import (
    FAILURES_OF_CALLER,
    FAILURES_OF_QUEUE,
    TASK_QUEUE,
    operator_fails,
    run_in_new_process,
)

each_recipe = pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)


def call_and_wait(sample: Sample) -> Any:
    outputs = sample.call(torch.ops.ascend)
    torch.npu.synchronize()
    return outputs


@each_recipe
@pytest.mark.usefixtures("no_leak")
def test_success(recipe: Recipe) -> None:
    call_and_wait(recipe.make(torch.bfloat16).to("npu"))


def workspace_of(sample: Sample) -> int:
    """Returns the bytes of workspace that the simulated CANN asks for."""
    with cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
    return max(entry["workspace"] for entry in log if entry.get("phase") == 2)


@pytest.mark.parametrize(
    ("recipe", "phase"),
    product(DEVICE_RECIPES, FAILURES_OF_CALLER),
    ids=lambda x: getattr(x, "id", x),
)
@pytest.mark.usefixtures("no_leak")
def test_failure(recipe: Recipe, phase: int) -> None:
    """The workspace's allocation (phase 0) or a phase fails; the next call succeeds."""
    sample = recipe.make(torch.bfloat16)
    on_npu = sample.to("npu")
    if phase == 0 and not workspace_of(on_npu):
        pytest.skip("asks for no workspace in the simulation")
    with operator_fails(sample.operator, phase=phase), pytest.raises(RuntimeError):
        call_and_wait(on_npu)
    outputs = call_and_wait(on_npu)
    for x, y in zip(outputs, sample.call(torch.ops.ascend), strict=True):
        assert torch.equal(x.cpu(), y)


@pytest.mark.parametrize("phase", FAILURES_OF_QUEUE)
@pytest.mark.parametrize(
    "operator",
    [
        "sparse_flash_attention_grad",
        pytest.param(
            "attention_update",
            marks=pytest.mark.skipif(
                TASK_QUEUE == 1, reason="torch_npu drops its own calls behind it, handles and all"
            ),
        ),
    ],
)
def test_failure_on_the_queue(operator: str, phase: int) -> None:
    """torch_npu's queue ends with the first failure: each in a process of its own."""
    out, _ = run_in_new_process(
        f"""
        import torch, ascend_attn_ops
        import cann_simulator
        from device_samples import first
        sample = first("{operator}").make(torch.bfloat16).to("npu")
        before = cann_simulator.live_handles()
        with cann_simulator.fail(phase={phase}):
            try:
                sample.call(torch.ops.ascend)
                torch.npu.synchronize()
            except RuntimeError:
                print("raised")
        print(before == cann_simulator.live_handles())
        """
    )
    assert out.split() == ["raised", "True"]


@pytest.mark.parametrize("maker", ["aclCreateTensor", "aclCreateIntArray", "aclCreateTensorList"])
def test_a_handle_that_cannot_be_made(maker: str) -> None:
    """It is not an argument that is absent, which null would stand for."""
    out, err = run_in_new_process(
        f"""
        import torch, ascend_attn_ops
        import cann_simulator
        from device_samples import first
        if "{maker}" == "aclCreateTensorList":
            sample = first("attention_update").make(torch.bfloat16).to("npu")
            call = lambda: sample.call(torch.ops.ascend)
        else:
            x, cache, slots = torch.ones(2, 1, 64), torch.zeros(1, 8, 1, 64), torch.arange(2)
            x, cache = x.half(), cache.half()
            tensors = [tensor.npu() for tensor in (x, cache, slots, x, cache)]
            call = lambda: torch.ops.ascend.scatter_pa_kv_cache_(*tensors)
        before = cann_simulator.live_handles()
        with cann_simulator.fail("{maker}", phase=-1):
            try:
                call()
                torch.npu.synchronize()
            except RuntimeError as error:
                print(error)
        print("no leak:", before == cann_simulator.live_handles())
        """
    )
    assert re.search(rf"ascend::\w+: aclnn\w+: {maker} gave no handle: .*361001\]\n", out + err)
    assert "no leak: True" in out


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
