"""The section `speed` of the check."""

from __future__ import annotations

import time

import pytest
from ascend_attn_ops.check import speed
from ascend_attn_ops.check.probe import Context


class Queue(Context):
    """A device that takes calls at once, and runs them when the host waits for it."""

    waiting = 0
    ran = 0

    def call(self) -> None:
        Queue.waiting += 1

    def synchronize(self) -> None:
        time.sleep(0.2 * Queue.waiting)
        Queue.ran += Queue.waiting
        Queue.waiting = 0


def test_a_slow_device_gets_few_calls() -> None:
    queue = Queue("npu:0")
    seconds, host = speed._times(queue.call, queue)
    assert Queue.ran == 5
    assert seconds == pytest.approx(0.2, rel=0.5)
    assert host < 0.05
