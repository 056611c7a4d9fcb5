"""Fixtures for tests of every operator, and the options that choose the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# OpenMP reads these when torch is imported. Threads that spin while they wait take the time of the
# other processes; two threads execute the code for several threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import ascend_attn_ops
from support import processes, turns

NPU_TESTS = Path(__file__).with_name("npu")


@pytest.fixture
def no_limits() -> Iterator[None]:
    """The samples are far smaller than what the device's tables allow."""
    with ascend_attn_ops.limits(None):
        yield


class NotOnThisDevice(pytest.File):
    """The NPU tests, in a process without the simulated NPU: their conftest.py is not loaded."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("run by `python tests/npu/run.py`, on a simulated NPU")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == NPU_TESTS and "CANN_SIM_SOC" not in os.environ:
        return NotOnThisDevice.from_parent(parent, path=path)
    return None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # Idle ranks would keep their memory to the end.
    if nextitem is None or nextitem.path.parent != item.path.parent:
        processes.end()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what the commit tier leaves out")
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="of every test function, run an N-th of the parameters (tests/support/turns.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: left out of the commit tier")
    config.addinivalue_line("markers", "by_turns(n): an n-th of the parameters in the commit tier")
    config.addinivalue_line("markers", "smoke: also run with an older torch before each commit")


def pytest_report_header() -> str:
    return f"parameters by turns: SEED={turns.seed():#x}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = turns.select(items, config.getoption("all"), config.getoption("share"))
    if left_out := set(items) - set(kept):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept
