"""A simulated CANN under the real torch_npu, so that code for NPUs runs where there are none.

    python -m cann_simulator train.py --device npu
    pytest -p cann_simulator

or `start()` in a program, before torch_npu is imported.
"""

from __future__ import annotations

import os
import shlex

# Both have readers among the modules below: the version, and torch without torch_npu.
__version__ = "0.1.0"
from cann_simulator import _torch  # noqa: F401
from cann_simulator._environment import environment
from cann_simulator._options import parse
from cann_simulator._report import counts
from cann_simulator._start import description, is_running, start
from cann_simulator.control import (
    altered,
    computing,
    fail,
    keeping_executors,
    live_handles,
    recorded_calls,
    unchecked,
    waits,
)

__all__ = [
    "altered",
    "computing",
    "counts",
    "description",
    "environment",
    "fail",
    "is_running",
    "keeping_executors",
    "live_handles",
    "recorded_calls",
    "start",
    "unchecked",
    "waits",
]

_OPTIONS = "CANN_SIMULATOR"


def pytest_addoption() -> None:
    """Start the simulation for `pytest -p cann_simulator`.

    The first hook of a plugin: no conftest.py, which may import torch_npu, has been read.
    """
    start(**parse(shlex.split(os.environ.get(_OPTIONS, "")), _OPTIONS))
