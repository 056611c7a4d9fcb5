"""`make test` runs the paths in PYTEST_ARGS in the half that has them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.checkout import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").exists() or shutil.which("make") is None,
    reason="no make, or no Makefile",
)


def commands(target: str, arguments: str) -> list[str]:
    """Returns the commands that make would run, without what it builds first."""
    result = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, f"PYTEST_ARGS={arguments}",
         "TEST_JOBS=3"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in result.stdout.splitlines() if "-m pytest" in line]


@pytest.mark.parametrize(
    ("arguments", "on_the_cpu"),
    [
        ("-k prompt", "-k prompt"),
        ("tests/test_limits.py", "tests/test_limits.py"),
        ("tests/npu/test_npu_errors.py::test_a_value -x", None),
        ("./tests/npu", None),
        ("-x tests/npu tests/test_limits.py", "-x tests/test_limits.py"),
    ],
)
def test_paths_choose_the_half(arguments: str, on_the_cpu: str | None) -> None:
    found = commands("test-cpu", arguments)
    if on_the_cpu is None:
        assert not found
    else:
        (line,) = found
        options = "--ignore=tests/npu -n 3 --dist=worksteal "
        assert line.partition(options)[2].partition(" ||")[0] == on_the_cpu
