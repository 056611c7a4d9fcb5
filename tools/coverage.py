"""Which lines the tests execute: of C++ by gcov, of Python by coverage.

    python tools/coverage.py [--no-npu] [--lines] [-- TESTS AND OPTIONS OF PYTEST]

Builds a copy of the checkout in out/coverage, at -O1, with the environments .venv and .venv-npu of
`make test`. Prints the share of each folder and, with --lines, every line that nothing executed.
A line counts as executed if it is in any of its instances: of a template, or of a copy for other
vector instructions.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from instrumented import CPU, NPU, ROOT, built, run, tests_parser

FLAGS = ["-O1", "--coverage", "-fprofile-update=prefer-atomic"]
FOLDERS = [f"csrc/{x}" for x in ("ops", "cpu", "autograd", "core", "dispatch", "npu", "python")]
FOLDERS += ["csrc", "simulation/csrc", "python", "simulation"]

# Counts of executions, by line, by file.
Counts = dict[str, dict[int, int]]


def of_gcov(folder: Path) -> Counts:
    counts: Counts = defaultdict(dict)
    output = folder / "gcov"
    output.mkdir(exist_ok=True)
    for data in sorted(folder.glob("build-*/**/*.gcno")):
        subprocess.run(
            ["gcov", "--json-format", "--object-directory", data.parent, data.name],
            cwd=output, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for report in output.glob("*.gcov.json.gz"):
            add(counts, json.loads(gzip.decompress(report.read_bytes())), folder)
            report.unlink()
    return counts


def add(counts: Counts, report: dict[str, Any], folder: Path) -> None:
    for file in report["files"]:
        path = Path(report["current_working_directory"], file["file"]).resolve()
        if not any(path.is_relative_to(folder / x) for x in ("csrc", "simulation/csrc")):
            continue
        lines = counts[str(path.relative_to(folder))]
        for line in file["lines"]:
            number = line["line_number"]
            lines[number] = max(lines.get(number, 0), line["count"])


def of_python(folder: Path, interpreter: Path) -> Counts:
    report = folder / "python.json"
    for command in (["combine", "-q"], ["json", "-q", "-o", report]):
        subprocess.run([interpreter, "-m", "coverage", *command], cwd=folder, check=False)
    counts: Counts = {}
    for name, file in json.loads(report.read_text())["files"].items():
        executed = dict.fromkeys(file["executed_lines"], 1)
        counts[name] = executed | dict.fromkeys(file["missing_lines"], 0)
    return counts


def table(counts: Counts) -> str:
    rows = [f"{'folder':18} {'lines':>7} {'executed':>9}"]
    seen: set[str] = set()
    for folder in FOLDERS:
        files = [x for x in counts if x.startswith(folder + "/") and x not in seen]
        seen.update(files)
        lines = [count for file in files for count in counts[file].values()]
        if lines:
            share = sum(map(bool, lines)) / len(lines)
            rows.append(f"{folder:18} {len(lines):7} {share:9.1%}")
    return "\n".join(rows)


def not_executed(counts: Counts, folder: Path) -> str:
    rows = []
    for file in sorted(counts):
        source = (folder / file).read_text().splitlines()
        for number, count in sorted(counts[file].items()):
            if not count:
                rows.append(f"{file}:{number}: {source[number - 1].strip()}")
    return "\n".join(rows)


def main() -> int:
    parser = tests_parser(__doc__)
    parser.add_argument("--lines", action="store_true", help="print lines that are not executed")
    arguments = parser.parse_args()
    folder = built(ROOT / "out/coverage", FLAGS, npu=not arguments.no_npu)
    for old in (*folder.glob("build-*/**/*.gcda"), *folder.glob(".coverage*")):
        old.unlink()
    measured = ["-m", "coverage", "run"]
    tests = arguments.pytest or ["tests", "--ignore=tests/npu"]
    commands = [[CPU, *measured, "-m", "pytest", *tests]]
    if not (arguments.no_npu or arguments.pytest):
        commands.append([NPU, *measured, "tests/npu/run.py"])
    # The task queue's levels differ in torch_npu alone.
    succeeded = [run(folder, command, {"NPU_LEVELS": "1"}) for command in commands]
    counts = of_gcov(folder) | of_python(folder, CPU)
    print(table(counts))
    if arguments.lines:
        print(not_executed(counts, folder))
    return int(not all(succeeded))


if __name__ == "__main__":
    sys.exit(main())
