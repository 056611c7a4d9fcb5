"""Fixtures for tests of every operator; support.turns has the options that choose the tests."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# OpenMP reads these when torch is imported. Threads that spin while they wait take the time of the
# other processes; two threads execute the code for several threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
# Inductor compiles in as many processes as the machine has cores, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import ascend_attn_ops
import torch
from support import processes
from support.turns import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
)

NPU_TESTS = Path(__file__).with_name("npu")


@pytest.fixture
def no_limits() -> Iterator[None]:
    """The samples are far smaller than what the device's tables allow."""
    with ascend_attn_ops.limits(None):
        yield


@pytest.fixture
def set_determinism() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


class NotOnThisDevice(pytest.File):
    """The NPU tests, in a process without the simulated NPU: their conftest.py is not loaded."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("run by `python tests/npu/run.py`, on a simulated NPU")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == NPU_TESTS and "CANN_SIM_SOC" not in os.environ:
        return NotOnThisDevice.from_parent(parent, path=path)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps in one worker what shares ranks, the runs of an example, verdicts, or an archive.

    xdist 3.8's own mark, xdist_group, has no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadGroupScheduling

    class Scheduler(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if "/distributed/" in file or file.endswith("test_rank_programs.py"):
                return "ranks"
            shared = "/examples/" in file or file.endswith(
                ("test_verdicts.py", "test_npu_faults.py", "test_packaging.py")
            )
            return file if shared else str(super()._split_scope(nodeid))

    return Scheduler(config, log) if config.getoption("dist") == "loadgroup" else None


# Every test and every module draws its own numbers, whatever ran before it.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(zlib.crc32(f"{item.path.name} {item.name}".encode()))


def pytest_collectstart(collector: pytest.Collector) -> None:
    torch.manual_seed(zlib.crc32(collector.name.encode()))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # Idle ranks would keep their memory to the end.
    if nextitem is None or nextitem.path.parent != item.path.parent:
        processes.end()
