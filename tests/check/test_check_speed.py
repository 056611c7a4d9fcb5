"""The section `speed` of the check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ascend_attn_ops.check import speed
from ascend_attn_ops.check.probe import Context


class Queue(Context):
    """A device that takes calls in 1 ms, and runs each in 200 ms when the host waits for it."""

    waiting = 0
    ran = 0
    now = 0.0

    def call(self) -> None:
        Queue.waiting += 1
        Queue.now += 0.001

    def synchronize(self) -> None:
        Queue.now += 0.2 * Queue.waiting
        Queue.ran += Queue.waiting
        Queue.waiting = 0


def test_a_slow_device_gets_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: Queue.now))
    queue = Queue("npu:0")
    seconds, host = speed._times(queue.call, queue)
    assert Queue.ran == 5
    assert seconds == pytest.approx(0.201)
    assert host == pytest.approx(0.001)
