"""Helpers of the NPU tests, which run in a process that tests/npu/run.py has set up."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import cann_simulator
import pytest

if "CANN_SIM_SOC" not in os.environ:
    pytest.exit("the NPU tests are started by `python tests/npu/run.py`", returncode=2)

import torch
from ascend_attn_ops.device_limits import table

TASK_QUEUE = int(os.environ["TASK_QUEUE_ENABLE"])

# The device of the process: ("A2", "9.1").
DEVICE = (os.environ["CANN_SIM_PRODUCT"], os.environ["CANN_SIM_VERSION"])

# For tests that start processes, or whole programs, and are alike at each level of the task queue.
once = pytest.mark.skipif(
    TASK_QUEUE != 1, reason="in processes of its own, and independent of the task queue: once"
)

# Where a call can fail, 0: the workspace's allocation, 1 and 2: the phases; and on which thread.
_ON_CALLER = {0: (0, 1, 2), 1: (0, 1), 2: ()}[TASK_QUEUE]


def _each_failure(thread: str, phases: tuple[int, ...]) -> pytest.MarkDecorator:
    elsewhere = pytest.mark.skip(reason=f"not on the {thread}'s thread at this level of the queue")
    return pytest.mark.parametrize(
        "phase",
        [pytest.param(phase, marks=() if phase in phases else elsewhere) for phase in (0, 1, 2)],
    )


each_caller_failure = _each_failure("caller", _ON_CALLER)
each_queue_failure = _each_failure(
    "queue", tuple({0, 1, 2} - set(_ON_CALLER)) if TASK_QUEUE else ()
)


@pytest.fixture
def no_leak() -> Iterator[None]:
    """No handle that was made in the test is left at its end."""
    before = cann_simulator.live_handles()
    yield
    assert cann_simulator.live_handles() == before


@pytest.fixture(autouse=True)
def empty_queue() -> Iterator[None]:
    """An error that a test leaves in the queue is its own."""
    yield
    torch.npu.synchronize()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Calls beyond the device's limits test the launch alone: kernels compute them wrong."""
    with cann_simulator.unchecked("bounds", "hang", "results"):
        yield


@pytest.fixture(autouse=True)
def unchecked_samples(request: pytest.FixtureRequest) -> None:
    """Lifts the simulated device's checks for samples that a device refuses."""
    callspec = getattr(request.node, "callspec", None)
    recipe = callspec.params.get("recipe") if callspec else None
    if recipe and not recipe.on_device:
        request.getfixturevalue("unchecked")


@contextmanager
def operator_fails(operator: str, **fault: Any) -> Iterator[None]:
    """`cann_simulator.fail` for each aclnn function of an operator of ours, and no other."""
    (functions,) = (row["aclnn"] for row in table() if row["operator"] == operator)
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(cann_simulator.fail(function, **fault))
        yield


def attention_functions(calls: list[dict[str, Any]]) -> Counter[str]:
    """How often recorded calls launch the functions of our operators; others are torch_npu's."""
    ours = {function for row in table() for function in row["aclnn"]}
    return Counter(x["function"] for x in calls if x.get("phase") == 2 and x["function"] in ours)


def run_in_new_process(code: str, **environment: str) -> tuple[str, str]:
    """Returns what `code` writes to standard output and to standard error."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr
