"""Builds a copy of this checkout with other compiler flags, beside the usual build."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
PACKAGES = ("python", "simulation")


def copied(folder: Path, changed: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Returns a copy of what git tracks, but for the text of files that are `changed`.

    A file whose content stays the same keeps its time, and its object. Sources that git tracks no
    longer go: builds compile all files of a folder.
    """
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for file in folder.glob("**/csrc/**/*.cpp"):
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


def build(folder: Path, flags: Iterable[str], cpu: Path, npu: Path | None = None) -> None:
    """`cpu` builds `_C`; `npu`, the interpreter with torch_npu, `_npu` and the simulated CANN."""
    variables = ("ASCEND_ATTN_OPS_FLAGS", "CANN_SIMULATOR_FLAGS")
    environment = {**os.environ, **dict.fromkeys(variables, " ".join(flags))}
    parts = [
        ("core", cpu, folder),
        ("npu", npu, folder),
        ("simulation", npu, folder / "simulation"),
    ]
    for part, interpreter, project in parts:
        if interpreter is not None:
            subprocess.run(
                [interpreter, "setup.py", "-q", "build_ext", "--inplace",
                 "--build-temp", folder / f"build-{part}"],
                cwd=project, env={**environment, "ASCEND_ATTN_OPS_BUILD": part}, check=True,
            )  # fmt: skip


def test_file(name: str) -> str:
    """The path in the checkout of `test_<name>.py`, which is in one of the folders of tests."""
    (path,) = ROOT.glob(f"tests/**/test_{name}.py")
    return str(path.relative_to(ROOT))
