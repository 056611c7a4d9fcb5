"""Fixtures and helpers of the NPU tests, in a process that tests/npu/run.py has set up."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cann_simulator
import pytest

if "CANN_SIM_SOC" not in os.environ:
    pytest.exit("the NPU tests are started by `python tests/npu/run.py`", returncode=2)

import torch
from ascend_attn_ops._core.device_limits import table

from support import fresh
from support.processes import free_port

# With the samples, which most of the code for new processes imports.
fresh.CONTEXT.set_forkserver_preload(
    ["numpy", "torch", "support.fresh", "support.samples", "device_samples"]
)

TASK_QUEUE = int(os.environ["TASK_QUEUE_ENABLE"])

# The device of the process: ("A2", "9.1").
DEVICE = (os.environ["CANN_SIM_PRODUCT"], os.environ["CANN_SIM_VERSION"])

# For tests that start processes, or whole programs, and are alike at each level of the task queue.
once = pytest.mark.skipif(
    TASK_QUEUE != 1, reason="in processes of its own, and independent of the task queue: once"
)

captured = pytest.mark.skipif(
    TASK_QUEUE == 2, reason="torch_npu captures no graph at level 2: test_level_2"
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


def attention_functions(calls: list[dict[str, Any]]) -> Counter[str]:
    """How often recorded calls launch the functions of our operators; others are torch_npu's."""
    ours = {function for row in table() for function in row["aclnn"]}
    return Counter(x["function"] for x in calls if x.get("phase") == 2 and x["function"] in ours)


def first_phases(calls: list[dict[str, Any]], function: str) -> list[dict[str, Any]]:
    """The arguments of each recorded call of a function, and its context's determinism."""
    found = [x for x in calls if x.get("phase") == 1 and x["function"] == function]
    return [{**x["arguments"], "context": x["deterministic"]} for x in found]


# torch_npu, the simulated CANN and the library read these when they are imported.
READ_AT_IMPORT = ("CANN_SIM_SOC", "CANN_SIM_VERSION", "LD_LIBRARY_PATH", "ASCEND_ATTN_OPS_CHECK")


def ended(code: str, seconds: float = 400, **environment: str) -> fresh.Ended:
    """Returns how `code` ended in a process forked from one that has torch_npu imported.

    Where imports read the environment that is asked for, it starts a process of its own.
    """
    if all(environment.get(x, os.environ.get(x)) == os.environ.get(x) for x in READ_AT_IMPORT):
        return fresh.run(code, seconds, **environment)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True, text=True, check=False, timeout=seconds,
    )  # fmt: skip
    return fresh.Ended(result.returncode, result.stdout, result.stderr)


def run_in_new_process(code: str, **environment: str) -> tuple[str, str]:
    """Returns what `code` writes to standard output and to standard error."""
    status, out, err = ended(code, **environment)
    assert status == 0, err
    return out, err


def on_ranks(ranks: int, code: str, **environment: str) -> list[fresh.Ended]:
    """Runs `code` on so many NPUs, each in a process like those of run_in_new_process."""
    environment = {
        **cann_simulator.environment(devices=ranks, task_queue=TASK_QUEUE), **environment,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
    }  # fmt: skip
    code = f"import torch\ntorch.set_num_threads(1)\n{textwrap.dedent(code)}"
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(
            lambda rank: ended(code, **environment, RANK=str(rank), LOCAL_RANK=str(rank)),
            range(ranks),
        ))  # fmt: skip
