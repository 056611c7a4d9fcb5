"""Runs the NPU tests: the real torch_npu over the simulated CANN, at each level of its task queue.

    python tests/npu/run.py [arguments of pytest]

NPU_LEVELS=1 runs them at one level only. Paths among the arguments choose tests; exit status 5 says
that the arguments choose none of these. Needs an environment with torch_npu, and the extension
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
    TESTS / "npu" / name
    for name in (
        "test_npu_devices.py",
        "test_npu_fused_infer.py",
        "test_npu_long_packs.py",
        "test_npu_sinks_and_ropes.py",
        "test_torch_npu_operators_devices.py",
    )
]
# The mode of streams by level of the task queue. Strict streams find the same errors at any level.
STREAMS = {0: "lenient", 1: "strict", 2: "lenient"}

# pytest's status where the arguments choose no test.
NONE_CHOSEN = 5


def path_of(argument: str) -> Path | None:
    """Returns the path of tests in an argument, without a test's name; None if it has none."""
    path = Path(argument.partition("::")[0])
    return path.resolve() if path.exists() and {"/", ".py"} & {*argument, path.suffix} else None


def chosen(tests: list[Path], arguments: list[str]) -> list[str]:
    """Returns the part of `tests` that the paths in the arguments choose: all without paths."""
    paths = {x: path for x in arguments if (path := path_of(x))}
    within = [x for x, path in paths.items() if any(path.is_relative_to(y) for y in tests)]
    around = [str(x) for x in tests if any(x.is_relative_to(y) for y in paths.values())]
    return within or around if paths else [str(x) for x in tests]


def main() -> int:
    failed, ran = [], False
    arguments = sys.argv[1:]
    options = [x for x in arguments if path_of(x) is None]
    for product, cann in DEVICES:
        first = (product, cann) == DEVICES[0]
        tests = chosen([TESTS / "npu"] if first else WHERE_DEVICES_DIFFER, arguments)
        if not tests:
            continue
        for level in map(int, os.environ.get("NPU_LEVELS", "0,1,2").split(",")):
            run = f"Ascend {product} with CANN {cann}, TASK_QUEUE_ENABLE={level}"
            print(run, flush=True)
            environment = {
                **os.environ,
                **cann_simulator.environment(
                    product=product, cann=cann, task_queue=level, streams=STREAMS[level]
                ),
            }
            environment["PYTHONPATH"] = os.pathsep.join(PACKAGES)
            command = [sys.executable, "-m", "pytest", *tests, *options]
            status = subprocess.run(command, env=environment, check=False).returncode
            ran = ran or status != NONE_CHOSEN
            if status not in (0, NONE_CHOSEN):
                failed.append(run)
    for run in failed:
        print(f"failed: {run}", file=sys.stderr)
    return len(failed) if ran else NONE_CHOSEN


if __name__ == "__main__":
    sys.exit(main())
