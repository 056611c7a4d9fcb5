"""Builds and tests this checkout with several versions of torch, and prints a table.

    python tools/matrix.py 2.7.1 2.10.0:2.10.0.post4 --share 12

TORCH:TORCH_NPU names a torch and the torch_npu to build with, TORCH alone a build for the CPU.
It builds and tests the source distribution, so that a missing file shows. Environments and
sources are kept in --home, and used again.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environment
import instrumented
from instrumented import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))


@dataclass
class Row:
    """The results of one version."""

    torch: str
    torch_npu: str = ""
    built: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        results = [*self.built.values(), *self.tests.values()]
        return not any(re.search("^no$|not installed|failed|error", text) for text in results)

    def cells(self) -> list[str]:
        return [
            self.torch,
            self.built.get("_C", ""),
            self.tests.get("CPU", ""),
            self.torch_npu or "-",
            self.built.get("_npu", ""),
            self.tests.get("NPU", ""),
        ]


HEADER = ["torch", "`_C` compiles", "CPU tests", "torch_npu", "`_npu` compiles", "NPU tests"]


def unpack_sources(python: Path, target: Path) -> None:
    """Make `target` a source distribution of this checkout; files that are the same keep their age.

    So that what was compiled before is not compiled again, and what the distribution lacks shows.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        information = ["egg_info", f"--egg-base={folder}"]
        sdist = ["setup.py", "-q", *information, "sdist", f"--dist-dir={folder}"]
        subprocess.run([python, *sdist], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
        (archive,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(archive, folder)
        unpacked = folder / archive.name.removesuffix(".tar.gz")
        names = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
        for name in names:
            source, copy = unpacked / name, target / name
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
        record = target / ".sources"
        before = record.read_text().splitlines() if record.exists() else []
        for name in set(map(Path, before)) - names:
            (target / name).unlink(missing_ok=True)
        record.write_text("".join(f"{name}\n" for name in sorted(names)))


def logged(log: Path, step: Callable[..., bool], *arguments: Any) -> bool:
    """Take a step with its output in `log`, and print the end of that if it fails."""
    print(f"  {log}", flush=True)
    with log.open("w") as file:
        succeeded = step(*arguments, output=file)
    if not succeeded:
        print("".join(log.read_text().splitlines(keepends=True)[-40:]), flush=True)
    return succeeded


def build(row: Row, module: str, python: Path, sources: Path, logs: Path) -> bool:
    """Build `_C` or `_npu`; with the latter, the simulated CANN that its tests run on."""
    warnings = 0
    for part in {"_C": ["core"], "_npu": ["npu", "simulation"]}[module]:
        log = logs / f"build_{part}"
        if not logged(log, instrumented.build_part, sources, part, python):
            row.built[module] = "no"
            return False
        warnings += log.read_text().count("warning:")
    row.built[module] = f"{warnings} warnings" if warnings else "yes"
    return True


def test(row: Row, kind: str, log: Path, sources: Path, *command: object, share: int) -> None:
    jobs = os.environ.get("TEST_JOBS") or os.cpu_count()
    options = ("-q", "-n", jobs, "--dist=loadgroup", f"--share={share}")
    succeeded = logged(log, instrumented.run, sources, [*command, *options])
    # pytest's last lines: the NPU tests run once for each device and level of the task queue.
    endings = re.findall(r"^=*\s*((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", log.read_text(), re.M)
    counts: Counter[str] = Counter()
    for count, result in re.findall(r"(\d+) (failed|passed|skipped|error)", " ".join(endings)):
        counts[result] += int(count)
    if not (succeeded or counts["failed"] or counts["error"]):
        counts["error"] += 1  # one of the processes ended without a line of its own
    row.tests[kind] = ", ".join(f"{count} {result}" for result, count in counts.items() if count)


def run_version(spec: str, options: argparse.Namespace) -> Row:
    row = Row(*spec.partition(":")[::2])
    home = options.home / spec.replace(":", "-")
    print(spec, flush=True)
    try:
        python, npu = environment.with_both(options.home, spec, options.python)
    except subprocess.CalledProcessError:  # pip has said why; the other versions go on
        row.built["_C"] = "not installed"
        return row
    sources = home / "sources"
    unpack_sources(python, sources)
    logs = home / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    if not build(row, "_C", python, sources, logs):
        return row
    if npu:
        build(row, "_npu", npu, sources, logs)
    if options.compile_only:
        return row
    chosen = ["-m", "smoke"] if options.smoke else ["--all"]
    test(
        row, "CPU", logs / "test_cpu", sources, python, "-m", "pytest", "tests",
        "--ignore=tests/npu", *chosen, share=options.share,
    )  # fmt: skip
    if row.built.get("_npu", "no") != "no":
        test(
            row, "NPU", logs / "test_npu", sources, npu, "tests/npu/run.py", "--all",
            share=options.share,
        )  # fmt: skip
    return row


def print_rows(rows: list[list[str]]) -> None:
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


def print_table(rows: list[Row], options: argparse.Namespace) -> None:
    extent = "compiled only" if options.compile_only else "every test"
    if options.smoke:
        extent = "the tests marked smoke"
    elif options.share > 1 and not options.compile_only:
        extent = f"one of {options.share} parameters of each test"
    compiler = environment.output(os.environ.get("CXX", "c++"), "--version").splitlines()[0]
    version = environment.output(options.python, "--version").strip()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    print(f"\n{today}, {platform.machine()}, {version}, {compiler}; {extent}\n")
    print_rows([HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)])


def main() -> int:
    parser = instrumented.parser(__doc__)
    parser.add_argument("versions", nargs="+", metavar="TORCH[:TORCH_NPU]")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="see tests/conftest.py")
    parser.add_argument("--smoke", action="store_true", help="run the tests of that mark alone")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to test with")
    parser.add_argument("--home", type=Path, default=CACHE / "ascend_attn_ops/matrix")
    options = parser.parse_args()
    rows = [run_version(spec, options) for spec in options.versions]
    print_table(rows, options)
    return sum(not row.ok for row in rows)


if __name__ == "__main__":
    sys.exit(main())
