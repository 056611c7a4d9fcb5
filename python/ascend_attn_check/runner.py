"""Runs the probes in a child process, which is restarted after a crash and after a hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_attn_check.results import Result, scrub

HANG = 60.0  # seconds
START = 300.0  # until the libraries are loaded, on a device that is shared


@dataclass(frozen=True)
class Task:
    """A probe, as its process has announced it."""

    section: str
    group: str
    id: str
    quick: bool
    danger: str
    longest: float  # seconds


class Stopped(Exception):
    """Raised when the child has ended, or does not answer; the message says how."""


def child_command(device: str, quick: bool, memory: int, recorded: Path | None = None) -> list[str]:
    options = json.dumps([device, quick, memory, recorded and str(recorded)])
    return [sys.executable, "-m", "ascend_attn_check.child", options]


class Child:
    """A process of child.py."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._read = b""
        try:
            self.tasks = [Task(*task) for task in self._answer(START)]
        except Stopped:
            self.close(0)
            raise

    def run(self, id: str, seconds: float) -> tuple[Result, bool]:
        """Return the result of a probe, and whether the process cannot go on after it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(id).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reader says why
        result, stopped = self._answer(seconds)
        return Result(**result), bool(stopped)

    def _answer(self, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                raise Stopped(f"no answer within {seconds:g} seconds")
            chunk = os.read(self._output, 2**16)
            if not chunk:
                raise Stopped(self._how_it_ended())
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        how = f"exit status {status}"
        if status < 0:
            how = f"signal {signal.Signals(-status).name}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return "\n".join([f"the process has ended, {how}", *map(scrub, last)])

    def close(self, seconds: float = 5) -> None:
        """End the process, and those that it has started; give it some time to leave the device."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe and not pipe.closed:
                pipe.close()
        self._selector.close()
        self._errors.close()


class Runner:
    """Starts children as they are needed."""

    def __init__(self, command: Sequence[str], hang: float = HANG) -> None:
        self._command, self._hang = command, hang
        self._child: Child | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(5)

    def tasks(self) -> list[Task]:
        """Return all probes.

        Raises:
            Stopped: The child cannot start.
        """
        return self._started().tasks

    def run(self, task: Task) -> Result:
        """Run a probe; a crash and a hang are results too."""
        try:
            result, stopped = self._started().run(task.id, max(self._hang, task.longest))
        except Stopped as how:
            self._end(0)
            return Result(task.section, task.group, task.id, "differs", str(how))
        if stopped:
            self._end(0)
        return result

    def _started(self) -> Child:
        if self._child is None:
            self._child = Child(self._command)
        return self._child

    def _end(self, seconds: float) -> None:
        if self._child is not None:
            self._child.close(seconds)
            self._child = None
