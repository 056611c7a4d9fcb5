"""Builds this checkout for aarch64 on another machine, and tests it there under QEMU.

    python tools/aarch64.py 2.10.0:2.10.0.post4 --share 12

TORCH:TORCH_NPU names what to build with. The interpreter is Debian's Python for arm64, unpacked
into a folder and run by QEMU, with the aarch64 wheels of torch and torch_npu. It runs setup.py, and
the compiler that setup.py calls is this machine's cross compiler, at full speed. No root is needed.
Downloads and builds are kept in --home, and used again.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environment
import instrumented
import matrix

# Programs that this machine needs, by the Debian packages that have them.
PROGRAMS = {
    "qemu-user-static": "qemu-aarch64-static",
    "g++-aarch64-linux-gnu": "aarch64-linux-gnu-g++",
    "ninja-build": "ninja",
}
# Packages of the emulated machine.
DEBIAN_PACKAGES = ["python3", "libpython3-dev", "libstdc++6", "libgomp1"]
VERSION = "2.10.0:2.10.0.post4"
PLATFORMS = ["manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64"]
# The first is of the generation of a Kunpeng 920, without products of bfloat16; older processors
# lack the atomic instructions in torch's own libraries. The second has all that QEMU knows, among
# it SVE and the products of bfloat16 and of int8.
PROCESSORS = ["neoverse-n1", "max"]
# Each operator is called once or more.
NPU_SMOKE = "test_public_functions or test_the_caches_are_those_of_the_cpu"
# Left out by default: programs that train for minutes, ranks (QEMU's fork can hang in a process
# with several threads), and tests whose results do not depend on the processor.
LEFT_OUT = [
    "npu", "distributed", "device_rules", "examples/test_example.py",
    "examples/test_paged_decode.py", "repository/test_packaging.py", "test_limits.py",
]  # fmt: skip


def apt(folder: Path, *arguments: str) -> None:
    """Run apt-get for arm64 alone, with the sources of this machine and nothing else of it."""
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    (folder / "archives/partial").mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
    }
    given = [f"--option={name}={value}" for name, value in options.items()]
    subprocess.run(["apt-get", "-qq", *given, *arguments], check=True)


def emulated_python(home: Path) -> Path:
    """Return an arm64 interpreter, in a folder with all libraries that it needs."""
    root = home / "debian"
    ready = root / "ready"
    if not ready.exists():
        shutil.rmtree(root, ignore_errors=True)
        apt(home / "apt", "update")
        apt(home / "apt", "--yes", "--download-only", "install", *DEBIAN_PACKAGES)
        for package in sorted((home / "apt/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
        if not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")
        (python,) = root.glob("usr/bin/python3.[0-9]*[0-9]")
        # Its headers are not where Debian's Python says, and one of them includes another by the
        # name of the machine.
        headers = root / "usr/include"
        for file in root.glob(f"usr/lib/{python.name}/_sysconfigdata_*.py"):
            file.write_text(file.read_text().replace("'/usr/include", f"'{headers}"))
        here = headers / python.name / "aarch64-linux-gnu"
        here.mkdir()
        (here / python.name).symlink_to(headers / here.name / python.name)
        ready.write_text(python.name)
    return root / "usr/bin" / ready.read_text()


def compilers(home: Path) -> Path:
    """Return a folder where g++ and the like are the cross compiler.

    torch's inductor asks for the instructions of the machine it runs on, which a cross compiler
    cannot know.
    """
    folder = home / "compilers"
    folder.mkdir(parents=True, exist_ok=True)
    for name, compiler in {"cc": "gcc", "gcc": "gcc", "c++": "g++", "g++": "g++"}.items():
        arguments = '"${@/#-march=native/-march=armv8-a}"'
        script(folder / name, "bash", f"aarch64-linux-gnu-{compiler} {arguments}")
    return folder


def script(path: Path, shell: str, command: str) -> None:
    path.write_text(f"#!/bin/{shell}\nexec {command}\n")
    path.chmod(0o755)


def install(folder: Path, python: Path, *arguments: str) -> None:
    """Have the pip of this machine install aarch64 wheels."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check",
            f"--target={environment.site_packages(folder)}",
            "--only-binary=:all:", *platforms, "--implementation=cp",
            f"--python-version={python.name.removeprefix('python')}", *arguments,
        ],
        check=True,
    )  # fmt: skip


def make_environment(folder: Path, python: Path) -> None:
    """Make what `python -m venv` would: an interpreter with packages of its own.

    The interpreter is a script, so that tests can start `sys.executable` too: only QEMU knows what
    to do with an arm64 program.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib" / python.name / "site-packages").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\n")
    (folder / "bin").mkdir()
    root = python.parents[2]
    script(folder / "bin/python", "sh", f'qemu-aarch64-static -L {root} -0 "$0" {python} "$@"')


def with_torch(folder: Path, torch: str, python: Path) -> Path:
    ready = folder / "ready"
    if not ready.exists():
        make_environment(folder, python)
        install(folder, python, *environment.TOOLS, *environment.TESTS)
        install(folder, python, "--no-deps", f"torch=={torch}")
        packages = environment.site_packages(folder)
        install(folder, python, *environment.needed_by_torch(packages))
        ready.touch()
    return folder / "bin/python"


def with_torch_npu(folder: Path, base: Path, torch_npu: str, python: Path) -> Path:
    """As in environment.py, torch_npu is not where the tests of the CPU run."""
    ready = folder / "ready"
    if not ready.exists():
        make_environment(folder, python)
        packages = environment.site_packages(folder)
        (packages / "base.pth").write_text(f"{environment.site_packages(base)}\n")
        install(folder, python, "--no-deps", f"torch_npu=={torch_npu}")
        ready.touch()
    return folder / "bin/python"


class Report:
    """The rows of a table: steps, their results, and how long they took."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(self, what: str, step: Callable[..., str], *arguments: Any, **options: Any) -> None:
        start = time.monotonic()
        result = step(*arguments, **options)
        self.rows.append([what, result, f"{(time.monotonic() - start) / 60:.1f}"])

    def print(self) -> None:
        programs = [("qemu-aarch64-static", "--version"), ("aarch64-linux-gnu-g++", "--version")]
        versions = [environment.output(*program).splitlines()[0] for program in programs]
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        print(f"\n{today}, {', '.join(versions)}\n")
        matrix.print_rows([["", "", "minutes"], ["---"] * 3, *self.rows])


def build_and_test(spec: str, options: argparse.Namespace, report: Report) -> bool:
    torch, _, torch_npu = spec.partition(":")
    row = matrix.Row(torch, torch_npu)
    home: Path = options.home / spec.replace(":", "-")
    base, npu = options.home / torch / "environment", home / "npu"
    sources, logs = home / "sources", home / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def prepare() -> str:
        interpreter = emulated_python(options.home)
        with_torch(base, torch, interpreter)
        if torch_npu:
            with_torch_npu(npu, base, torch_npu, interpreter)
        matrix.unpack_sources(base / "bin/python", sources)
        return "ready"

    def build(module: str, folder: Path) -> str:
        matrix.build(row, module, folder / "bin/python", sources, logs)
        return row.built[module]

    def test(name: str, folder: Path, *command: str, share: int = 1) -> str:
        log = logs / name.replace(", ", "_")
        matrix.test(row, name, log, sources, folder / "bin/python", *command, share=share)
        return row.tests[name]

    report.add("environments", prepare)
    report.add(f"`_C` with torch {torch}", build, "_C", base)
    if torch_npu and row.ok:
        report.add(f"`_npu` with torch_npu {torch_npu}", build, "_npu", npu)
    if options.compile_only or not row.ok:
        return row.ok
    os.environ["NPU_LEVELS"] = "1"
    tests = ["-m", "pytest", "tests", "--all", *(f"--ignore=tests/{name}" for name in LEFT_OUT)]
    for processor in options.processors:
        os.environ["QEMU_CPU"] = processor
        name = f"CPU, {processor}"
        report.add(name, test, name, base, *tests, share=options.share)
        if torch_npu:
            name = f"NPU, {processor}"
            report.add(name, test, name, npu, "tests/npu/run.py", "--all", "-k", NPU_SMOKE)
    return row.ok


def main() -> int:
    parser = instrumented.parser(__doc__)
    parser.add_argument("version", nargs="?", default=VERSION, metavar="TORCH[:TORCH_NPU]")
    parser.add_argument("--share", type=int, default=60, metavar="N", help="see tests/conftest.py")
    parser.add_argument("--processors", nargs="+", default=PROCESSORS, help="names that QEMU has")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--home", type=Path, default=matrix.CACHE / "ascend_attn_ops/aarch64")
    options = parser.parse_args()
    missing = [package for package, program in PROGRAMS.items() if not shutil.which(program)]
    if missing:
        sys.exit(f"aarch64 needs Debian's packages: apt-get install {' '.join(missing)}")
    options.home = options.home.resolve()
    os.environ["PATH"] = f"{compilers(options.home)}{os.pathsep}{os.environ['PATH']}"
    # Not where this machine keeps its own.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.home / "inductor")
    report = Report()
    ok = build_and_test(options.version, options, report)
    report.print()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
