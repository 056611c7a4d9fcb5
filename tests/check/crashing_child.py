"""A child of the check, on the CPU, whose probes crash, hang, and pass."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from ascend_attn_check import child
from ascend_attn_check.probe import Context, Outcome, Probe, Skip


def crash(context: Context) -> Outcome:
    print("the last words", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def leave(context: Context) -> Outcome:
    os._exit(7)


def hang(context: Context) -> Outcome:
    time.sleep(600)
    raise AssertionError("unreachable")


def interrupt(context: Context) -> Outcome:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
    raise AssertionError("unreachable")


def skip(context: Context) -> Outcome:
    raise Skip("not here")


def fail(context: Context) -> Outcome:
    raise RuntimeError("a file of /home/somebody/secret/place.py is not here")


def succeed(context: Context) -> Outcome:
    print("not an answer")
    return Outcome("pass", figures={"error": 0.25})


PROBES = [
    Probe("numbers", "all", run.__name__, run, quick=run is succeed, danger=danger)
    for run, danger in (
        (crash, ""), (succeed, ""), (hang, ""), (leave, ""), (skip, ""), (fail, ""),
        (interrupt, "it stops"),
    )
]  # fmt: skip


def serve(context: Context, connection: Connection, output: str) -> None:
    child.SECTIONS = {"numbers": lambda context: iter(PROBES)}
    child.serve(context, connection, output)
