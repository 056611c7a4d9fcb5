"""A call leaves to the queue's thread its determinism, the thread's state and kept executors."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from ascend_attn_check.limits import first_phase_only
from cann_simulator.control import listening
from device_samples import DEVICE_RECIPES, KEEPING_EXECUTORS, first, is_pack_gradient
from support.samples import Recipe, Sample
from support.simulated_npu import TASK_QUEUE
from test_npu_conformance import COMPARABLE, attention_calls, call_theirs

# The limits refuse a deterministic gradient that the device refuses.
NOT_DETERMINISTIC = ("sparse_flash_mla_grad", "sparse_lightning_indexer_kl_loss_grad")
CAN_BE_DETERMINISTIC = [r for r in DEVICE_RECIPES if r.operator.name not in NOT_DETERMINISTIC]


@pytest.mark.parametrize("recipe", CAN_BE_DETERMINISTIC, ids=lambda recipe: recipe.id)
def test_determinism_reaches_the_device(recipe: Recipe) -> None:
    """torch.use_deterministic_algorithms, as it was when the operator was called."""
    sample: Sample = recipe.make(torch.bfloat16).to("npu")
    for on in (True, False):
        with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
            torch.use_deterministic_algorithms(on)
            try:
                sample.call(torch.ops.ascend)
            finally:
                # At level 2 the first phase runs later, on the thread of the queue.
                torch.use_deterministic_algorithms(False)
        calls = [entry for entry in attention_calls(log) if entry["phase"] == 1]
        # The metadata of a call is another one.
        launches = [entry for entry in calls if not entry["function"].endswith("Metadata")]
        assert len(launches) == 1 or is_pack_gradient(recipe)
        for call in calls:
            assert call["deterministic"] == on
            assert call["arguments"].get("deterministic", on) == on


def steps(log: list[dict[str, Any]]) -> list[str]:
    return [str(entry.get("step", entry.get("phase"))) for entry in log]


@pytest.mark.parametrize(
    "recipe", [r for r in COMPARABLE if r.on_device], ids=lambda recipe: recipe.id
)
def test_the_thread_is_prepared_as_torch_npu_prepares_it(recipe: Recipe) -> None:
    """Around the first phase: which functions reuse executors, and which switch that off."""
    sample: Sample = recipe.make(torch.bfloat16).to("npu")
    with cann_simulator.computing(False), cann_simulator.keeping_executors():
        with cann_simulator.recorded_calls() as log:
            call_theirs(sample)
        theirs = steps(log)
    with cann_simulator.computing(False), cann_simulator.keeping_executors():
        with cann_simulator.recorded_calls() as log:
            sample.call(torch.ops.ascend)
        ours = steps(log)
    # On the caller's thread the second phase and what follows it come when the queue gets there.
    calls = Counter(x["phase"] for x in attention_calls(log))
    assert Counter(ours) >= Counter(theirs)
    # Ours computes some packed sequences one after another.
    assert calls[1] > 1 or len(ours) == len(theirs)
    assert ours[: ours.index("1") + 1] == theirs[: theirs.index("1") + 1]
    reuses = int(recipe.operator.name in KEEPING_EXECUTORS)
    key = f"SetPTACacheHashKey {reuses}" if TASK_QUEUE == 2 else f"SetPTAHashKey {reuses}"
    assert key in ours[: ours.index("1")]


@pytest.mark.skipif(TASK_QUEUE == 2, reason="one thread calls all first phases of a device")
def test_what_other_threads_see_while_a_call_switches_determinism() -> None:
    """Our calls wait. torch_npu's see the switch: all threads of a device have one context."""
    gradient = first("sparse_flash_attention_grad").make(torch.bfloat16).to("npu")
    gradient = gradient.given(deterministic=True)
    other = first("flash_attention_score").make(torch.bfloat16).to("npu")
    switched, go_on = Event(), Event()

    def wait(function: str) -> None:
        if function == "aclnnSparseFlashAttentionGrad":
            switched.set()
            go_on.wait(60)

    with (
        cann_simulator.computing(False),
        cann_simulator.recorded_calls() as log,
        listening(wait),
        ThreadPoolExecutor(2) as pool,
    ):
        calls = [pool.submit(gradient.call, torch.ops.ascend)]
        try:
            assert switched.wait(60)
            call_theirs(other)
            calls.append(pool.submit(other.call, torch.ops.ascend))
            with pytest.raises(TimeoutError):
                calls[-1].result(timeout=0.2)
        finally:
            go_on.set()
        for call in calls:
            call.result()
    first_phases = [entry for entry in attention_calls(log) if entry["phase"] == 1]
    assert [entry["deterministic"] for entry in first_phases] == [1, 1, 0]
    assert first_phases[1]["function"] == first_phases[2]["function"]


OF_KEPT_EXECUTORS = [r for r in DEVICE_RECIPES if r.operator.name in KEEPING_EXECUTORS]


@pytest.mark.parametrize("recipe", OF_KEPT_EXECUTORS, ids=lambda recipe: recipe.id)
@pytest.mark.usefixtures("no_leak")
def test_a_call_with_other_tensors_reuses_the_executor(recipe: Recipe) -> None:
    """No first phase, as in torch_npu; the result is that of the tensors of this call."""
    sample: Sample = recipe.make(torch.bfloat16)
    with cann_simulator.keeping_executors():
        sample.to("npu").call(torch.ops.ascend)
        name, given = next(iter(sample.tensors.items()))
        sample = sample.replace(**{name: given * 0.5})
        on_npu = sample.to("npu")
        with cann_simulator.recorded_calls() as log:
            outputs = on_npu.call(torch.ops.ascend)
        with cann_simulator.computing(False), cann_simulator.recorded_calls() as their_log:
            for _ in range(2):
                call_theirs(on_npu)
                torch.npu.synchronize()  # later calls find an executor after its second phase
    assert [x["phase"] for x in attention_calls(log)] == [2]
    assert [x["phase"] for x in attention_calls(their_log)] == [1, 2, 2]
    for x, y in zip(outputs, sample.call(torch.ops.ascend), strict=True):
        assert torch.equal(x.cpu(), y)


@pytest.mark.parametrize("sequences", [2, 100])
def test_equal_calls_of_a_pack_find_its_executor(sequences: int) -> None:
    """However long the key is, which has the lengths. At level 2 the first phase copies it."""
    x = torch.ones(4 * sequences, 2, 64, dtype=torch.bfloat16, device="npu")
    ends = list(range(4, 4 * sequences + 1, 4))
    with (
        cann_simulator.computing(False),
        cann_simulator.keeping_executors(),
        cann_simulator.recorded_calls() as log,
    ):
        for _ in range(50):
            ascend_attn_ops.flash_attention_score(
                x, x, x, num_heads=2, layout="TND",
                actual_seq_lengths_query=ends, actual_seq_lengths_key=ends,
            )  # fmt: skip
            torch.npu.synchronize()
    assert Counter(x["phase"] for x in attention_calls(log)) == {1: 1, 2: 50}
    assert sum(": found" in step for step in steps(log)) == 49


@pytest.mark.skipif(TASK_QUEUE == 2, reason="the executor is kept for the thread of the queue")
@pytest.mark.usefixtures("no_leak")
def test_a_call_that_finds_an_executor_and_does_not_launch_gives_it_back() -> None:
    sample = first("flash_attention_score").make(torch.bfloat16).to("npu")
    with cann_simulator.keeping_executors(), cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
        torch.npu.synchronize()
        with first_phase_only():
            sample.call(torch.ops.ascend)
    assert [x["phase"] for x in attention_calls(log)] == [1, 2]
    assert sum(": found" in step for step in steps(log)) == 1


def test_a_view_at_another_offset_has_an_executor_of_its_own() -> None:
    views = torch.ones(2, 1, 4, 2, 64, dtype=torch.bfloat16, device="npu")
    with (
        cann_simulator.computing(False),
        cann_simulator.keeping_executors(),
        cann_simulator.recorded_calls() as log,
    ):
        for x in views:
            ascend_attn_ops.flash_attention_score(x, x, x, layout="BSND")
            torch.npu.synchronize()
    assert [x["phase"] for x in attention_calls(log)] == [1, 2] * 2


def test_another_argument_has_an_executor_of_its_own() -> None:
    sample: Sample = first("flash_attention_score").make(torch.bfloat16).to("npu")

    def call() -> None:
        sample.call(torch.ops.ascend)
        # Or the queue's second phase comes after the first phase of the next call.
        torch.npu.synchronize()

    with (
        cann_simulator.computing(False),
        cann_simulator.keeping_executors(),
        cann_simulator.recorded_calls() as log,
    ):
        call()
        for change in ({"scale_value": 0.375}, {"pre_tokens": 2147483646}):
            sample = sample.replace(**change)
            call()
        other_stream = torch.npu.Stream()
        with torch.npu.stream(other_stream):
            call()
        call()
        torch.npu.set_stream_limit(other_stream, 22, 44)
        for _ in range(2):
            with torch.npu.stream(other_stream):
                call()
    assert [x["phase"] for x in attention_calls(log)] == [1, 2] * 4 + [2] + [1, 2] + [2]
