"""Fixtures for tests of every operator, and --sample, which runs a part of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two threads execute the code for several threads; OpenMP reads these when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ascend_attn_ops
from support import processes

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
    parser.addoption(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="of every test function run the first parameters, and each N-th after them",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    step = config.getoption("sample")
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        (left_out if seen[function] % step else kept).append(item)
        seen[function] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
