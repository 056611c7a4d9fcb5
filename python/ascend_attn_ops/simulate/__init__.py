"""A simulated CANN under the real torch_npu, so that code for NPUs runs where there are none.

    python -m ascend_attn_ops.simulate train.py --device npu
    pytest -p ascend_attn_ops.simulate

or `start()` in a program, before torch_npu is imported.
"""

from __future__ import annotations

import os
import shlex

from ascend_attn_ops.simulate._environment import environment
from ascend_attn_ops.simulate._functions import function
from ascend_attn_ops.simulate._options import parse
from ascend_attn_ops.simulate._report import counts
from ascend_attn_ops.simulate._start import description, is_running, start
from ascend_attn_ops.simulate.control import (
    computing,
    fail,
    keeping_executors,
    live_handles,
    recorded_calls,
    waits,
)

__all__ = [
    "computing",
    "counts",
    "description",
    "environment",
    "fail",
    "function",
    "is_running",
    "keeping_executors",
    "live_handles",
    "recorded_calls",
    "start",
    "waits",
]

_OPTIONS = "ASCEND_SIMULATE"


def pytest_addoption() -> None:
    """Start the simulation for `pytest -p ascend_attn_ops.simulate`.

    The first hook of a plugin: no conftest.py, which may import torch_npu, has been read.
    """
    start(**parse(shlex.split(os.environ.get(_OPTIONS, "")), _OPTIONS))
