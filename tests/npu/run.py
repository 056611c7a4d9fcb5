"""Runs the NPU tests: the real torch_npu over the simulated CANN.

    python tests/npu/run.py [arguments of pytest]

All tests run on the first device, at level 1 of torch_npu's task queue; what depends on the level
at the others as well, and what depends on the device on the others. The simulator's own tests run
if simulation/ differs from commit SINCE, by default the last but one. `--all` runs everything
everywhere, and NPU_LEVELS=0,2 everything at those levels. Paths among the arguments choose tests;
exit status 5 says that the arguments choose none of these. Needs an environment with torch_npu,
and the extension built in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [str(ROOT / folder) for folder in ("python", "simulation")]
sys.path[:0] = PACKAGES

import cann_simulator  # noqa: E402

TESTS, SIMULATOR_TESTS = ROOT / "tests/npu", ROOT / "simulation/tests"

# Every test runs on the first; where devices differ, on the others as well.
DEVICES = [("A2", "9.1"), ("A2", "8.5"), ("950", "9.1")]
WHERE_DEVICES_DIFFER = [
    TESTS / "test_npu_devices.py", TESTS / "test_npu_fused_infer.py",
    TESTS / "test_npu_sinks_and_ropes.py",
    SIMULATOR_TESTS / "test_torch_npu_operators_devices.py",
]  # fmt: skip
# Launches, failures and memory are those of a thread, which the level chooses.
WHERE_LEVELS_DIFFER = [
    TESTS / "test_npu_concurrency.py", TESTS / "test_npu_equals_cpu.py",
    TESTS / "test_npu_errors.py", TESTS / "test_npu_faults.py", TESTS / "test_npu_graph_updates.py",
    TESTS / "test_npu_graphs.py", TESTS / "test_npu_launch_order.py",
    SIMULATOR_TESTS / "test_kernel_faults.py",
]  # fmt: skip
# The mode of streams by level of the task queue. Strict streams find the same errors at any level.
STREAMS = {1: "strict", 0: "lenient", 2: "lenient"}

# pytest's status where the arguments choose no test.
NONE_CHOSEN = 5


def simulator_has_changed() -> bool:
    command = ["git", "diff", "--quiet", os.environ.get("SINCE", "HEAD~1"), "--", "simulation"]
    try:
        return subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    except FileNotFoundError:
        return True


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
    everywhere = "--all" in options or "NPU_LEVELS" in os.environ
    with_simulator = len(options) < len(arguments) or "--all" in options or simulator_has_changed()
    for device in DEVICES:
        for level, streams in STREAMS.items():
            if str(level) not in os.environ.get("NPU_LEVELS", "0,1,2").split(","):
                continue
            tests = [TESTS, SIMULATOR_TESTS] if device == DEVICES[0] else WHERE_DEVICES_DIFFER
            if level != 1 and not everywhere:
                tests = WHERE_LEVELS_DIFFER if device == DEVICES[0] else []
            for folder in (TESTS, SIMULATOR_TESTS) if with_simulator else (TESTS,):
                part = chosen([x for x in tests if x.is_relative_to(folder)], arguments)
                if not part:
                    continue
                product, cann = device
                run = f"{folder.relative_to(ROOT)} on Ascend {product} with CANN {cann}, "
                run += f"TASK_QUEUE_ENABLE={level}"
                print(run, flush=True)
                environment = {
                    **os.environ,
                    **cann_simulator.environment(
                        product=product, cann=cann, task_queue=level, streams=streams
                    ),
                    "PYTHONPATH": os.pathsep.join([*PACKAGES, str(TESTS.parent)]),
                }
                command = [sys.executable, "-m", "pytest", *part, *options]
                status = subprocess.run(command, env=environment, check=False).returncode
                ran = ran or status != NONE_CHOSEN
                if status not in (0, NONE_CHOSEN):
                    failed.append(run)
    for run in failed:
        print(f"failed: {run}", file=sys.stderr)
    return len(failed) if ran else NONE_CHOSEN


if __name__ == "__main__":
    sys.exit(main())
