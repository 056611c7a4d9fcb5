"""Runs the examples as a user does, at sizes that take seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import fresh

# A lone small run is fastest, and disturbs others least, on one thread.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# Far more than a run takes on a busy machine.
SECONDS = 240


def command(script: Path, options: Mapping[str, object]) -> list[str]:
    return [str(script), *(f"--{name}={value}" for name, value in options.items())]


def torchrun(ranks: int, *arguments: str) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [*launcher, *arguments]


def start(*arguments: str) -> fresh.Ended:
    """Returns how a run ends; it is forked from a process that has torch imported."""
    return fresh.python(*arguments, seconds=SECONDS, **ENVIRONMENT)


def run(*arguments: str) -> str:
    """Returns the output of a run that must end well."""
    result = start(*arguments)
    assert result.status == 0, result.err
    return result.out


def kill_at(line: str, *arguments: str, ranks: bool = False) -> None:
    """Starts a process, and kills it, or its ranks, when it prints a line that begins like this."""
    environment = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, "-u", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for printed in process.stdout:
            if printed.startswith(line):
                killed = children.read_text().split() if ranks else [process.pid]
                for each in killed:
                    os.kill(int(each), signal.SIGKILL)
    assert process.returncode != 0 if ranks else process.returncode == -signal.SIGKILL


def metrics(out: Path) -> dict[str, Any]:
    """The metrics that a run has written, without the timings."""
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    del found["seconds"]
    return found
