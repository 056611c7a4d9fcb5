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

# A lone small run is fastest, and disturbs others least, on one thread.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(script: Path, options: Mapping[str, object]) -> list[str]:
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-u", str(script), *arguments]


def run(*arguments: str) -> str:
    """Returns the output of a process that must end well."""
    result = subprocess.run(
        arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def kill_at(line: str, *arguments: str) -> None:
    """Start a process, and kill it when it prints a line that begins like this."""
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            if printed.startswith(line):
                process.kill()
    assert process.returncode == -signal.SIGKILL


def metrics(out: Path) -> dict[str, Any]:
    """The metrics that a run has written, without the timings."""
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    del found["seconds"]
    return found
