"""A call leaves to the queue's thread its determinism, the thread's state and kept executors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cann_simulator
import pytest
import torch
from device_samples import DEVICE_RECIPES, first, is_pack_gradient
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
    reuses = int(recipe.operator.keeps_executors)
    key = f"SetPTACacheHashKey {reuses}" if TASK_QUEUE == 2 else f"SetPTAHashKey {reuses}"
    assert key in ours[: ours.index("1")]


KEEPING_EXECUTORS = [r for r in DEVICE_RECIPES if r.operator.keeps_executors]


@pytest.mark.parametrize("recipe", KEEPING_EXECUTORS, ids=lambda recipe: recipe.id)
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
    assert [x["phase"] for x in attention_calls(log)] == [2]
    assert [x["phase"] for x in attention_calls(their_log)] == [1, 2, 2]
    for x, y in zip(outputs, sample.call(torch.ops.ascend), strict=True):
        assert torch.equal(x.cpu(), y)


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
    assert [x["phase"] for x in attention_calls(log)] == [1, 2] * 4 + [2]
