"""Runs the NPU tests: the real torch_npu over the simulated CANN, at each level of its task queue.

    python tests/npu/run.py [arguments of pytest]

NPU_LEVELS=1 runs them at one level only. Needs an environment with torch_npu, and the extension
built in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGES = [str(TESTS.parent / folder) for folder in ("python", "simulation")]
sys.path[:0] = PACKAGES

import cann_simulator  # noqa: E402

# Every test runs on the first; where devices differ, on the others as well.
DEVICES = [("A2", "9.1"), ("A2", "8.5"), ("950", "9.1")]
WHERE_DEVICES_DIFFER = [
    TESTS / "npu" / name for name in ("test_npu_devices.py", "test_torch_npu_operators_devices.py")
]
# By level of the task queue: what one of them shows of streams, the others would show as well.
STREAMS = {0: "lenient", 1: "strict", 2: "lenient"}


def main() -> int:
    failed = []
    for product, cann in DEVICES:
        first = (product, cann) == DEVICES[0]
        tests = [TESTS / "npu"] if first else WHERE_DEVICES_DIFFER
        for level in map(int, os.environ.get("NPU_LEVELS", "0,1,2").split(",")):
            run = f"Ascend {product} with CANN {cann}, TASK_QUEUE_ENABLE={level}"
            print(run, flush=True)
            environment = {
                **os.environ,
                **cann_simulator.environment(
                    soc=product, cann=cann, task_queue=level, streams=STREAMS[level]
                ),
            }
            environment["PYTHONPATH"] = os.pathsep.join(PACKAGES)
            command = [sys.executable, "-m", "pytest", *map(str, tests), *sys.argv[1:]]
            status = subprocess.run(command, env=environment, check=False).returncode
            # 5: none of the tests that the arguments choose are among these.
            if status not in ((0,) if first else (0, 5)):
                failed.append(run)
    for run in failed:
        print(f"failed: {run}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
