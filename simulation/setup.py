"""Builds the libraries of the simulated CANN against the installed torch and torch_npu."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from setuptools import setup

# Importing torch loads an installed torch_npu, which fails on a machine without CANN.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
from building import precompiled, short_lines, units  # noqa: E402

OLDEST_PYTHON = (3, 10)
PACKAGE = "cann_simulator"
# An installed CANN has its libraries in lib64.
LIBRARIES = f"{PACKAGE}.cann.lib64"
# Folders that are compiled as one file each.
UNITS = {"opapi": ("csrc/opapi/core",), "cpu_fallback": ("csrc/cpu_fallback",)}
LIBRARIES_WITH_TENSORS = ("libopapi", "libcpu_fallback")
EMPTY_LIBRARIES = ["acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel"]
# Read by cann_simulator/_built_with.py before it loads the libraries.
BUILT_WITH = "built_with.json"
# Such as --coverage: for the compiler and the linker, after all others.
FLAGS = shlex.split(os.environ.get("CANN_SIMULATOR_FLAGS", ""))
COMPILE_ARGS = ["-std=c++20", "-O2", "-g0", "-Wall", "-Wextra"]
PUBLIC_VERSION = re.search(
    r'^__version__ = "(.+)"', (ROOT / PACKAGE / "__init__.py").read_text(), re.M
).group(1)  # type: ignore[union-attr]


def minor(version: str) -> str:
    """Return "2.10" for "2.10.0.post4+cpu"."""
    return ".".join(version.split(".")[:2])


def refuse(reason: str) -> None:
    sys.exit(f"cann_simulator cannot be built: {reason}")


# pip reads what this file says before it compares `requires-python`.
if sys.version_info < OLDEST_PYTHON:
    refuse(f"it needs Python 3.10 or later, and this is Python {sys.version.split()[0]}")


def installed() -> dict[str, str]:
    """Return the versions to compile with; none for a source distribution without them."""
    versions = {}
    for package in ("torch", "torch_npu"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # pip asks for "egg_info" before it builds anything, also in a source distribution.
            if {"sdist", "egg_info"} & set(sys.argv):
                return {}
            refuse(
                f"{package} is not installed here; install torch and torch_npu first, and then "
                "this package with pip install --no-build-isolation"
            )
    torch, torch_npu = versions.values()
    if minor(torch) != minor(torch_npu):
        refuse(
            f"torch {torch} and torch_npu {torch_npu} do not belong together; install the "
            f"torch_npu of torch {minor(torch)}"
        )
    return versions


def libraries() -> list[Any]:
    from torch.utils.cpp_extension import CppExtension, include_paths

    torch_npu = Path(importlib.util.find_spec("torch_npu").origin).parent  # type: ignore[union-attr, arg-type]
    headers = torch_npu / "include"
    # System headers, to silence warnings that are not ours.
    system = [
        *include_paths(),
        headers,
        *(headers / f"third_party/{x}/inc" for x in ("acl", "hccl")),
    ]

    def library(name: str, sources: str, *needs: str) -> Any:
        file, folders = f"lib{name}.so", UNITS.get(name, ())
        files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/{sources}"))
        return CppExtension(
            f"{LIBRARIES}.lib{name}",
            units(files, folders, Path("build/units")),
            include_dirs=[str(ROOT / "csrc")],
            library_dirs=[str(torch_npu / "lib")],
            extra_compile_args=[*COMPILE_ARGS, *(f"-isystem{x}" for x in system), *FLAGS],
            extra_link_args=[f"-Wl,-soname,{file}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed",
                             *(f"-l{needed}" for needed in needs), *FLAGS],
        )  # fmt: skip

    def empty(name: str, *needs: str) -> Any:
        return library(name, "empty_library.cpp", *needs)

    return [
        library("ascendcl", "ascendcl/*.cpp"),
        # torch_npu's libraries need these; libascendcl.so has all of their functions.
        *(empty(name, "ascendcl") for name in EMPTY_LIBRARIES),
        library("hccl", "hccl/*.cpp", "ascendcl"),
        # Later releases have some functions of HCCL here.
        empty("hcomm", "hccl"),
        library("atb", "atb/*.cpp"),
        library("opapi", "opapi/**/*.cpp", "ascendcl"),
        # torch_npu looks here for the function that destroys the executor of an abandoned call.
        empty("nnopbase", "opapi"),
        library("cpu_fallback", "cpu_fallback/*.cpp", "ascendcl", "torch_npu"),
    ]  # fmt: skip


def build_command(versions: dict[str, str]) -> Any:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """Gives the libraries CANN's names, and records what they are compiled with."""

        def get_ext_filename(self, fullname: str) -> str:
            return str(Path(*fullname.split("."))) + ".so"

        def build_extension(self, ext: Any) -> None:
            ext.library_dirs.append(str(Path(self.get_ext_fullpath(ext.name)).parent))
            with short_lines():
                if ext.name.endswith(LIBRARIES_WITH_TENSORS):
                    ext.extra_compile_args += precompiled(self.compiler, ext, Path(self.build_temp))
                super().build_extension(ext)

        def run(self) -> None:
            record = Path(self.build_lib, PACKAGE, BUILT_WITH)
            # setuptools compares times, which do not tell that torch is another.
            built = json.loads(record.read_text()) if record.exists() else None
            self.force = self.force or built != versions
            if self.inplace:
                (ROOT / PACKAGE / "cann/lib64").mkdir(exist_ok=True)
            super().run()
            record.write_text(json.dumps(versions, indent=2) + "\n")
            if self.inplace:
                self.copy_file(str(record), str(ROOT / PACKAGE))

    return Build.with_options(use_ninja=True)


def arguments_of_build() -> dict[str, Any]:
    """Returns what is compiled and what it requires: no other minor version of torch loads it."""
    versions = installed()
    if not versions or "sdist" in sys.argv:
        return {"version": PUBLIC_VERSION, "install_requires": ["torch", "torch_npu"]}
    torch = minor(versions["torch"])
    return {
        "version": f"{PUBLIC_VERSION}+torch{torch}",
        "install_requires": [
            *(f"{x}=={torch}.*" for x in versions),
            "pyyaml>=6,<7",
            "numpy>=1.26,<3",
        ],
        "ext_modules": libraries(),
        "cmdclass": {"build_ext": build_command(versions)},
    }


setup(**arguments_of_build(), zip_safe=False)
