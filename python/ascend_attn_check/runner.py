"""Runs the probes in a child process, which is restarted after a crash and after a hang."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ascend_attn_check.probe import Probe
from ascend_attn_check.results import Result, scrub

START = 300.0  # seconds until the libraries are loaded, on a device that is shared
PROCESSES: Any = multiprocessing.get_context("spawn")  # a fork would share the device's state

# Answers at one end of a pipe, and writes its output to a file of this name: `child.serve`.
Serve = Callable[[Connection, str], None]


class Stopped(Exception):
    """Raised when the child has ended, or does not answer; the message says how."""


class Runner:
    """Starts children as they are needed; a probe may take `hang` seconds."""

    def __init__(self, serve: Serve, hang: float) -> None:
        self._serve, self._hang = serve, hang
        self._process: Any = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(5)

    def probes(self) -> list[Probe]:
        """Return all probes, which run in the child.

        Raises:
            Stopped: The child cannot start.
        """
        self._start()
        return self._probes

    def run(self, probe: Probe) -> Result:
        """Run a probe; a crash and a hang are results too."""
        try:
            self._start()
            with contextlib.suppress(OSError):  # of a process that has ended: the answer says how
                self._connection.send(probe.id)
            result, healthy = self._answer(max(self._hang, probe.longest))
        except Stopped as how:
            self._end(0)
            return Result(probe.section, probe.group, probe.id, "differs", str(how))
        if not healthy:
            self._end(0)
        return result

    def _start(self) -> None:
        if self._process is not None:
            return
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._connection, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=self._serve, args=(theirs, self._output.name))
        process.start()
        theirs.close()
        self._process = process
        self._probes: list[Probe] = self._answer(START)

    def _answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise Stopped(f"no answer within {seconds:g} seconds")
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise Stopped(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        self._process.join()
        status = self._process.exitcode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        last = self._output.read().decode(errors="replace").strip().splitlines()[-3:]
        return "\n".join([f"the process has ended, {how}", *map(scrub, last)])

    def _end(self, seconds: float) -> None:
        """End the child, and what it has started; give it some time to leave the device."""
        if self._process is None:
            return
        self._connection.close()
        self._process.join(seconds)
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # one that is still starting
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._output.close()
        self._process = None
