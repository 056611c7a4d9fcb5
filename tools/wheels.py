"""Builds wheels for several versions of torch and of Python, on the machine's own architecture.

    python tools/wheels.py 2.10.0:2.10.0.post4 2.13.0:2.13.0 --python python3.10 python3.11

A wheel built with torch_npu also runs without it, on the CPU. Every wheel is compiled from the
source distribution and then installed in an environment of its own, where its report must pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import environment
import instrumented
from instrumented import ROOT
from matrix import CACHE

# Libraries of torch, torch_npu and CANN, which are where torch and torch_npu are. libgomp too: a
# second copy of it would have threads of its own.
NOT_BUNDLED = ["libtorch*", "libc10*", "libtorch_npu*", "libascend*", "libgomp*", "_C.*"]


def run(*command: object, folder: Path = ROOT) -> None:
    # With torch_npu installed, importing torch loads it, which fails on a machine without CANN.
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([str(part) for part in command], cwd=folder, env=variables, check=True)


def build_wheel(spec: str, python: str, options: argparse.Namespace) -> Path:
    """Return the wheel of one torch and one Python."""
    cpu, npu = environment.with_both(options.home / Path(python).name, spec, python)
    interpreter = npu or cpu
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(interpreter, "setup.py", "-q", "sdist", f"--dist-dir={folder}")
        (archive,) = folder.glob("*.tar.gz")
        pip = [interpreter, "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={folder}", archive)
        (wheel,) = folder.glob("*.whl")
        run(*pip, "install", "-q", "--no-deps", f"--target={folder / 'installed'}", wheel)
        run(interpreter, "-m", "ascend_attn_ops", folder=folder / "installed")
        if options.auditwheel:
            excluded = [f"--exclude={name}" for name in NOT_BUNDLED]
            repaired = f"--wheel-dir={folder / 'repaired'}"
            run(sys.executable, "-m", "auditwheel", "repair", *excluded, repaired, wheel)
            (wheel,) = (folder / "repaired").glob("*.whl")
        options.out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, options.out / wheel.name))


def main() -> None:
    parser = instrumented.parser(__doc__)
    parser.add_argument("versions", nargs="+", metavar="TORCH[:TORCH_NPU]")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="INTERPRETER")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--home", type=Path, default=CACHE / "ascend_attn_ops/wheels")
    parser.add_argument(
        "--auditwheel", action="store_true", help="give wheels a manylinux tag with auditwheel"
    )
    options = parser.parse_args()
    for python in options.python:
        for spec in options.versions:
            print(build_wheel(spec, python, options))


if __name__ == "__main__":
    main()
