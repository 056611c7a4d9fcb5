"""Runs code in a new process that has torch and the package imported already.

The process is forked from a server, which imports them once per worker of pytest: importing takes
longer than most of these tests. The server has read the environment of an import already, so a test
of such a variable starts a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["numpy", "torch", "torch.distributed", "ascend_attn_ops", __name__])
# The server finds these modules by its environment alone.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def _execute(code: str, environment: dict[str, str], folder: str) -> None:
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def run(code: str, seconds: float = 100, **environment: str) -> Ended:
    """Returns the exit status of `code` and what it writes; kills it after `seconds`."""
    with TemporaryDirectory() as folder:
        process = CONTEXT.Process(
            target=_execute, args=(textwrap.dedent(code), environment, folder), daemon=True
        )
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        written = {x.name: x.read_text(errors="replace") for x in Path(folder).iterdir()}
        assert process.exitcode is not None
        return Ended(process.exitcode, written.get("out", ""), written.get("err", ""))
