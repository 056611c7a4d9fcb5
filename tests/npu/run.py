"""Runs the NPU tests: the real torch_npu over the simulated CANN, once per level of its task queue.

    python tests/npu/run.py [arguments of pytest]

Needs an environment with torch_npu, and the extension built in it. It builds the simulation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import cann_sim  # noqa: E402
from cann_sim.build import build  # noqa: E402


def main() -> int:
    build()
    failed = []
    for level in (0, 1, 2):
        print(f"TASK_QUEUE_ENABLE={level}", flush=True)
        environment = {**os.environ, **cann_sim.environment(task_queue=level)}
        environment["PYTHONPATH"] = str(TESTS.parent / "python")
        command = [sys.executable, "-m", "pytest", str(TESTS / "npu"), *sys.argv[1:]]
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            failed.append(level)
    if failed:
        print(f"failed with TASK_QUEUE_ENABLE in {failed}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
