"""Calls that fail, each in a process of its own: torch_npu's task queue does not survive its first
failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import cann_simulator
import pytest
import torch
from ascend_attn_ops._core.device_limits import table
from device_samples import to_npu
from support.samples import OPERATORS, Recipe, Sample, bytes_of
from torch import Tensor

MESSAGE = "EZ9999: planted"
MAKERS = ("aclCreateTensor", "aclCreateTensorList", "aclCreateIntArray")


@dataclass(frozen=True)
class Fault:
    """A failure of a call of `{function}`, in a phase of `cann_simulator.fail`."""

    phase: int
    status: int = 361001
    of: str = "{function}"
    last: bool = False  # of the handles that one maker makes for the call; else the first
    found: bool = False  # an equal call has left its executor


# None: there is no memory for outputs.
FAULTS: dict[str, Fault | None] = {
    "first phase": Fault(1, status=161002), "second phase": Fault(2),
    "kernel": Fault(3, status=507015), "memory for outputs": None,
    "memory for the workspace": Fault(0),
    "memory for the workspace, executor found": Fault(0, found=True),
    "first tensor": Fault(-1, of="aclCreateTensor"),
    "last tensor": Fault(-1, of="aclCreateTensor", last=True),
    "list of tensors": Fault(-1, of="aclCreateTensorList"),
    "list of integers": Fault(-1, of="aclCreateIntArray", last=True),
}  # fmt: skip


def recipes_of(operator: str) -> list[Recipe]:
    return [recipe for recipe in OPERATORS[operator].recipes if recipe.on_device]


def handles_of(arguments: dict[str, Any]) -> dict[str, int]:
    """How many handles of each kind a call has had, from the log of its first phase."""
    made = dict.fromkeys(MAKERS, 0)
    for x in arguments.values():
        if isinstance(x, list):
            tensors = [item for item in x if isinstance(item, dict)]
            made["aclCreateTensorList" if tensors else "aclCreateIntArray"] += 1
            made["aclCreateTensor"] += len(tensors)
        elif isinstance(x, dict) and "sizes" in x:
            made["aclCreateTensor"] += 1
    return made


def survey() -> dict[str, list[dict[str, Any]]]:
    """The calls of each function of ours: which recipe makes it, and with how many handles."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for row in table():
        for recipe in recipes_of(row["operator"]):
            sample = to_npu(recipe.make(torch.bfloat16))
            with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
                sample.call(torch.ops.ascend)
            for entry in log:
                if entry.get("phase") == 1 and entry["function"] in row["aclnn"]:
                    call = {"recipe": recipe.id, "handles": handles_of(entry["arguments"])}
                    calls.setdefault(entry["function"], []).append(call)
    return calls


@contextmanager
def no_memory() -> Iterator[None]:
    """Nothing is left of what the allocator has, and it gets no more."""
    torch.npu.empty_cache()
    all_of_it = torch.npu.mem_get_info()[1]
    torch.npu.set_per_process_memory_fraction(torch.npu.memory_reserved() / all_of_it)
    fillers = []
    for size in (2**21, 2**17, 2**13, 2**9):
        try:
            while True:
                fillers.append(torch.empty(size, dtype=torch.uint8, device="npu"))
        except RuntimeError:
            pass
    try:
        yield
    finally:
        fillers.clear()
        torch.npu.set_per_process_memory_fraction(1.0)


def result_of(sample: Sample) -> tuple[Tensor, ...]:
    """The outputs, and the arguments, of which a call in place changes some; on the CPU."""
    outputs = sample.call(torch.ops.ascend)
    return tuple(bytes_of(x.cpu()) for x in (*outputs, *sample.tensors.values()))


def what_follows(recipe: Recipe) -> str:
    try:
        outputs = result_of(to_npu(recipe.make(torch.bfloat16)))
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    expected = result_of(recipe.make(torch.bfloat16))
    wrong = [
        i for i, (x, y) in enumerate(zip(outputs, expected, strict=True)) if not torch.equal(x, y)
    ]
    return f"other than on the CPU: {wrong}" if wrong else "right"


def call_that_fails(operator: str, function: str, name: str, recipe: str, handles: dict[str, int]
                    ) -> dict[str, Any]:  # fmt: skip
    """Where it raises, what, which handles and how much memory are left; then the next call."""
    chosen = next(x for x in recipes_of(operator) if x.id == recipe)
    fault = FAULTS[name]
    sample = to_npu(chosen.make(torch.bfloat16))
    answer: dict[str, Any] = {"where": "nowhere", "text": ""}
    before, memory = cann_simulator.live_handles(), torch.npu.memory_allocated()
    if fault is None:
        planted: Any = no_memory()
    else:
        of = fault.of.format(function=function)
        planted = cann_simulator.fail(
            of, fault.phase, fault.status, MESSAGE, after=handles[of] - 1 if fault.last else 0
        )
    with ExitStack() as stack:
        if fault is not None and fault.found:
            stack.enter_context(cann_simulator.keeping_executors())
            sample.call(torch.ops.ascend)
            torch.npu.synchronize()
        stack.enter_context(planted)
        where = "call"
        try:
            outputs = sample.call(torch.ops.ascend)
            where = "wait"
            torch.npu.synchronize()
            time.sleep(0.1)  # torch_npu's thread empties its queue before it marks it as failed
            torch.npu.synchronize()
        except RuntimeError as error:
            answer = {"where": where, "text": str(error), "type": type(error).__name__}
            if "torch_npu's task queue has" in answer["text"]:  # seen before torch_npu reported it
                with pytest.raises(RuntimeError) as report:
                    torch.npu.synchronize()
                answer["text"] = str(report.value)
    outputs = None  # noqa: F841
    after = cann_simulator.live_handles()
    answer["handles"] = {kind: after[kind] - before[kind] for kind in after}
    answer["memory"] = torch.npu.memory_allocated() - memory
    answer["next"] = what_follows(chosen)
    return answer
