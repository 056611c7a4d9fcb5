"""Several threads, streams and devices at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from device_samples import DEVICE_RECIPES, as_launched, first, is_launched
from support.samples import RECIPES, Recipe, named_tensors
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
