"""Copies of this checkout, built with other compiler flags or torch versions, and their tests."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

ROOT = Path(__file__).parents[1]
# The environments of `make test`; the second one has torch_npu.
CPU, NPU = ROOT / ".venv/bin/python", ROOT / ".venv-npu/bin/python"
NOTHING: Mapping[str, str] = MappingProxyType({})
PACKAGES = ("python", "simulation")
# Builds compile, Python imports, and pytest collects, all of these that a copy has.
FOUND_BY_NAME = ("**/csrc/**/*.cpp", "python/**/*.py", "tests/**/*.py", "simulation/**/*.py")


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


def tests_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of the options of tools that run tests on the CPU and on the simulated NPU."""
    options = parser(doc)
    options.add_argument("--no-npu", action="store_true", help="leaves out the simulated NPU")
    options.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="of pytest")
    return options


def copied(folder: Path, changed: Mapping[str, str] = NOTHING) -> Path:
    """Returns a copy of what git tracks, but for the text of files that are `changed`.

    A file whose content stays the same keeps its time, and its object. Files that git no longer
    tracks are removed where builds and pytest would find them.
    """
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for file in (file for pattern in FOUND_BY_NAME for file in folder.glob(pattern)):
        if str(file.relative_to(folder)) not in names:
            file.unlink()
    for name in filter(None, names):
        source, target = ROOT / name, folder / name
        if source.exists():
            content = changed[name].encode() if name in changed else source.read_bytes()
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    return folder


def python_path(folder: Path) -> str:
    """Return the PYTHONPATH that finds both packages in `folder`."""
    return os.pathsep.join(str(folder / package) for package in PACKAGES)


def run(
    folder: Path,
    command: Iterable[object],
    variables: Mapping[str, str] = NOTHING,
    output: IO[str] | None = None,
) -> bool:
    """Run a command in a copy, with its packages; tell whether it succeeded."""
    environment = {**os.environ, "PYTHONPATH": python_path(folder), **variables}
    errors = None if output is None else subprocess.STDOUT
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, stdout=output, stderr=errors)
    return done.returncode == 0


def build_part(
    folder: Path,
    part: str,
    python: Path,
    variables: Mapping[str, str] = NOTHING,
    output: IO[str] | None = None,
) -> bool:
    """Build "core", that is `_C`; "npu", that is `_npu`; or "simulation", the simulated CANN."""
    project = folder / "simulation" if part == "simulation" else folder
    options = ["-q", "build_ext", "--inplace", f"--build-temp={folder / f'build-{part}'}"]
    variables = {"ASCEND_ATTN_OPS_BUILD": part, **variables}
    return run(project, [python, "setup.py", *options], variables, output)


def built(
    folder: Path, flags: Iterable[str], *, changed: Mapping[str, str] = NOTHING, npu: bool = True
) -> Path:
    """Returns a copy that is built with `flags`."""
    names = ("ASCEND_ATTN_OPS_FLAGS", "CANN_SIMULATOR_FLAGS")
    variables = dict.fromkeys(names, " ".join(flags))
    copied(folder, changed)
    for part in ("core", "npu", "simulation") if npu else ("core",):
        if not build_part(folder, part, CPU if part == "core" else NPU, variables):
            raise SystemExit(f"{folder}: {part} was not built")
    return folder


def test_file(name: str) -> str:
    """The path in the checkout of `test_<name>.py`, which is in one of the folders of tests."""
    (path,) = ROOT.glob(f"tests/**/test_{name}.py")
    return str(path.relative_to(ROOT))
