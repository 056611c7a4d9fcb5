"""Runs Python in a new process that has torch imported already.

The process is forked from a server, which imports torch once per worker of pytest: importing takes
longer than most of these tests. The package is imported in the new process, which so reads the
package's environment variables; those of torch and OpenMP are read in the server.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
# torch_npu, which the package imports, takes seconds.
_PACKAGE = ["ascend_attn_ops"] if "CANN_SIM_SOC" in os.environ else []
CONTEXT.set_forkserver_preload(["numpy", "torch", "torch.distributed", *_PACKAGE, __name__])
# The server finds these modules by its environment alone.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def _execute(arguments: Sequence[str]) -> None:
    """Does what the interpreter does with these arguments, on the present streams."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    kind, *rest = arguments
    if kind == "-c":
        exec(compile(rest[0], "<code>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


def _execute_in(folder: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    _execute(arguments)


def python(*arguments: str, seconds: float = 100, **environment: str) -> Ended:
    """Returns how `python *arguments` ends and what it writes; kills it after `seconds`."""
    with TemporaryDirectory() as folder:
        process = CONTEXT.Process(target=_execute_in, args=(folder, arguments, environment))
        process.start()
        try:
            process.join(seconds)
        finally:
            process.kill()
            process.join()
        written = {x.name: x.read_text(errors="replace") for x in Path(folder).iterdir()}
        assert process.exitcode is not None
        return Ended(process.exitcode, written.get("out", ""), written.get("err", ""))


def run(code: str, seconds: float = 100, **environment: str) -> Ended:
    """Returns how `code` ends and what it writes; kills it after `seconds`."""
    return python("-c", textwrap.dedent(code), seconds=seconds, **environment)
