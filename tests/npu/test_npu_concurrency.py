"""Several threads, streams and devices at once."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from device_samples import DEVICE_RECIPES, as_launched, first, is_launched
from support.samples import RECIPES, Recipe, named_tensors
from support.simulated_npu import run_in_new_process
from support.tolerance import assert_same_bits


def elements(recipe: Recipe) -> list[int]:
    return [x.numel() for x in named_tensors(recipe.make(torch.bfloat16).inputs).values()]


each_recipe = pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)
# Calls that take no time and have something to compute.
SMALL = [r for r in filter(is_launched, RECIPES) if all(elements(r)) and sum(elements(r)) < 50_000][
    ::5
]


@pytest.mark.usefixtures("no_leak", "unchecked")
def test_threads_with_streams_of_their_own() -> None:
    def work(thread: int) -> None:
        stream = torch.npu.Stream()
        with ascend_attn_ops.limits(None), torch.npu.stream(stream):
            for recipe in SMALL[thread:] + SMALL[:thread]:
                sample = as_launched(recipe.make(torch.bfloat16))
                outputs = sample.to("npu").call(torch.ops.ascend)
                stream.synchronize()
                expected = sample.call(torch.ops.ascend)
                assert_same_bits(tuple(x.cpu() for x in outputs), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@each_recipe
def test_current_stream(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16).to("npu")
    streams = set()
    for stream in (torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()):
        with (
            cann_simulator.computing(False),
            cann_simulator.recorded_calls() as log,
            torch.npu.stream(stream),
        ):
            sample.call(torch.ops.ascend)
        streams |= {entry["stream"] for entry in log if entry.get("phase") == 2}
    assert len(streams) == 3


@each_recipe
def test_second_device(recipe: Recipe) -> None:
    """A call runs on the device of its tensors, which need not be the current one."""
    sample = recipe.make(torch.bfloat16)
    assert torch.npu.current_device() == 0
    on_npu = sample.to("npu:1")
    with cann_simulator.recorded_calls() as log:
        outputs = on_npu.call(torch.ops.ascend)
    assert torch.npu.current_device() == 0
    assert {x.device for x in outputs} == {torch.device("npu:1")}
    assert {entry["device"] for entry in log if "phase" in entry} == {1}
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))


def test_streams_with_few_cores() -> None:
    """torch_npu asks for the cores of a thread once it has used such a stream."""
    sample = first("attention_update").make(torch.bfloat16)
    on_npu, expected = sample.to("npu"), sample.call(torch.ops.ascend)
    stream = torch.npu.Stream()
    torch.npu.set_stream_limit(stream, 22, 44)
    for used in (stream, torch.npu.default_stream()):
        used.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(used):
            outputs = on_npu.call(torch.ops.ascend)
        torch.npu.synchronize()
        assert_same_bits(tuple(x.cpu() for x in outputs), expected)
    assert torch.npu.get_stream_limit(stream) == {"cube_core_num": 22, "vector_core_num": 44}


# Nothing is left of calls: of many, of those of other tests (no_leak), of the faulty ones.


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
    out, _ = run_in_new_process("import test_npu_concurrency as x\nprint(*x.growth())")
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
