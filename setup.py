"""Builds the extension modules: `_C` always, and `_npu` where torch_npu can be imported."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from setuptools import setup

# With torch_npu installed, importing torch loads it, which fails on a machine without CANN.
# Building needs only its headers and libraries.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "simulation"))
from building import precompiled, short_lines, units  # noqa: E402

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 7, 1)
COMPILE_ARGS = ["-std=c++20", "-O3", "-fopenmp", "-g0", "-Wall", "-Wextra"]
# No kernel reads floating-point exceptions or errno; loops that may raise them are not vectorised
# for AVX2, SSE2 and NEON. Results are the same.
COMPILE_ARGS += ["-fno-trapping-math", "-fno-math-errno"]
# Clang wants braces around `options` in an operator's list of all arguments.
COMPILE_ARGS += ["-Wno-missing-braces"]
# Vector units of x86-64 that loops can be compiled for.
VECTOR_UNITS = ("baseline", "avx2", "avx512")
# Such as --coverage: for the compiler and the linker, after all others.
FLAGS = shlex.split(os.environ.get("ASCEND_ATTN_OPS_FLAGS", ""))
# Read by python/ascend_attn_ops/_core/built_with.py before it loads what was compiled.
BUILT_WITH = "built_with.json"


def release(version: str) -> tuple[int, ...]:
    """Return (2, 10, 0) for "2.10.0.post4+cpu"."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def minor(version: str) -> str:
    """Return "2.10" for "2.10.0.post4+cpu"."""
    return ".".join(map(str, release(version)[:2]))


def refuse(reason: str) -> None:
    sys.exit(f"ascend_attn_ops cannot be built: {reason}")


# pip reads what this file says before it compares `requires-python`.
if sys.version_info < OLDEST_PYTHON:
    refuse(f"it needs Python 3.10 or later, and this is Python {sys.version.split()[0]}")


def version_of_torch() -> str | None:
    """Return the version of the torch to compile with; None for a source distribution without."""
    try:
        import torch
    except ModuleNotFoundError:
        # pip asks for "egg_info" before it builds anything, also in a source distribution.
        if {"sdist", "egg_info"} & set(sys.argv):
            return None
        refuse(
            "torch is not installed here; install torch (for the NPU kernels torch_npu too) first, "
            "and then this package with pip install --no-build-isolation"
        )
    version = str(torch.__version__)
    if release(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        refuse(f"it needs torch {oldest} or later, and torch {version} is installed")
    return version


def torch_npu_folder() -> Path | None:
    spec = importlib.util.find_spec("torch_npu")
    return Path(spec.origin).parent if spec and spec.origin else None


TORCH = version_of_torch()
PUBLIC_VERSION = re.search(
    r'^__version__ = "(.+)"', (ROOT / "python/ascend_attn_ops/__init__.py").read_text(), re.M
).group(1)  # type: ignore[union-attr]


def sources(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, root_dir=ROOT, recursive=True))


def core_sources() -> list[str]:
    return [x for x in sources("csrc/**/*.cpp") if not x.startswith("csrc/npu/")]


# Folders that are compiled as one file each.
CORE_UNITS = ("csrc/core", "csrc/dispatch", "csrc/ops", "csrc/autograd", "csrc/cpu/common")
NPU_UNITS = ("csrc/npu", "csrc/npu/aclnn")
UNITS = Path("build/units")


def torch_headers() -> list[str]:
    """Return torch's folders as system folders: its warnings are not ours."""
    from torch.utils.cpp_extension import include_paths

    return [f"-isystem{path}" for path in include_paths()]


def core_extension() -> Any:
    """Schemas, checks, and the CPU, Meta and autograd kernels: needs torch alone."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        "ascend_attn_ops._C",
        units(core_sources(), CORE_UNITS, UNITS),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[*COMPILE_ARGS, *torch_headers(), *vector_units(), *FLAGS],
        extra_link_args=[*openmp(), *FLAGS],
    )


def vector_units() -> list[str]:
    """Return what compiles loops for the one vector unit that ASCEND_ATTN_OPS_VECTOR_UNITS names.

    With "all", the default, a build runs on every processor. "native" is this processor's unit.
    """
    unit = os.environ.get("ASCEND_ATTN_OPS_VECTOR_UNITS") or "all"
    if unit not in ("all", "native", *VECTOR_UNITS):
        expected = ", ".join(("all", "native", *VECTOR_UNITS))
        refuse(f"ASCEND_ATTN_OPS_VECTOR_UNITS={unit}: expected one of {expected}")
    if unit == "all" or platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    if unit == "native":
        macros = compiler_says("-march=native", "-dM", "-E", "-x", "c++", os.devnull)
        needed = {
            "avx512": ("AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL"),
            "avx2": ("AVX2", "FMA", "BMI", "BMI2"),
            "baseline": (),
        }
        unit = next(x for x in needed if all(f" __{y}__ " in macros for y in needed[x]))
    return [f"-DASCEND_ATTN_OPS_VECTOR_UNIT={unit}"]


def compiler_says(*arguments: str) -> str:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        refuse(f"there is no compiler {compiler[0]}; install g++, or set CXX to another")
    command = [*compiler, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def openmp() -> list[str]:
    """Return what links the OpenMP library of the compiler.

    GCC's is the one that torch brings, and a second copy would have threads of its own. Clang's is
    another, which torch does not have.
    """
    return ["-fopenmp"] if "clang" in compiler_says("--version") else []


def npu_extension() -> Any | None:
    """The NPU kernels, compiled against the headers of the installed torch_npu."""
    from torch.utils.cpp_extension import CppExtension

    torch_npu = torch_npu_folder()
    if torch_npu is None or TORCH is None:
        return None
    version = metadata.version("torch_npu")
    if minor(version) != minor(TORCH):
        refuse(
            f"torch {TORCH} and torch_npu {version} do not belong together; install the torch_npu "
            f"of torch {minor(TORCH)}, or none"
        )
    op_plugin = torch_npu / "include/third_party/op-plugin"
    if not op_plugin.exists():
        refuse(
            f"torch_npu {version} has no headers of op-plugin; install a post release of it, such "
            f"as the newest: pip install --no-deps 'torch_npu=={minor(version)}.*'"
        )
    # System headers, to silence warnings that are not ours.
    includes = [torch_npu / "include", op_plugin, torch_npu / "include/third_party/acl/inc"]
    return CppExtension(
        "ascend_attn_ops._npu",
        units(sources("csrc/npu/**/*.cpp"), NPU_UNITS, UNITS),
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=[str(torch_npu / "lib")],
        libraries=["torch_npu"],
        extra_compile_args=[
            *COMPILE_ARGS,
            *torch_headers(),
            *(f"-isystem{folder}" for folder in includes),
            # The torch version, in the form that torch_npu's headers expect.
            f"-DCURRENT_VERSION=V{'R'.join(TORCH.split('.')[:2])}",
            *FLAGS,
        ],
        extra_link_args=["-Wl,-rpath,$ORIGIN", *openmp(), *FLAGS],
    )


def build_command() -> Any:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """Records what each module is compiled with, and links `_npu` against `_C`."""

        def build_extension(self, ext: Any) -> None:
            module = ext.name.rpartition(".")[2]
            core = Path(self.get_ext_fullpath("ascend_attn_ops._C"))
            record = core.parent / BUILT_WITH
            modules = json.loads(record.read_text()) if record.exists() else {}
            versions = {"torch": TORCH}
            if module == "_npu":
                # `_C` provides schemas, checks, limits and CPU kernels.
                ext.library_dirs.append(str(core.parent))
                ext.extra_link_args.append(f"-l:{core.name}")
                versions["torch_npu"] = metadata.version("torch_npu")
            # setuptools compares times, which do not tell that torch is another.
            self.force = self.force or modules.get(module) != versions
            with short_lines():
                folder = Path(self.build_temp, module)
                ext.extra_compile_args += precompiled(self.compiler, ext, folder)
                super().build_extension(ext)
            record.write_text(json.dumps({**modules, module: versions}, indent=2) + "\n")

        def copy_extensions_to_source(self) -> None:
            folder = Path(self.get_finalized_command("build_py").get_package_dir("ascend_attn_ops"))
            super().copy_extensions_to_source()
            self.copy_file(str(Path(self.build_lib, "ascend_attn_ops", BUILT_WITH)), str(folder))

    return Build.with_options(use_ninja=True)


def extensions() -> list[Any]:
    """Return the extensions that ASCEND_ATTN_OPS_BUILD names, by default all.

    The Makefile builds those of torch_npu alone, next to a `_C` built with the same torch, and
    installs with none: pip would compile out of sight, and again each time.
    """
    wanted = os.environ.get("ASCEND_ATTN_OPS_BUILD", "core,npu").split(",")
    core = core_extension() if "core" in wanted else None
    npu = npu_extension() if "npu" in wanted else None
    return [extension for extension in (core, npu) if extension]


def arguments_of_build() -> dict[str, Any]:
    """Returns what is compiled and what it requires: no other minor version of torch loads it."""
    if TORCH is None or "sdist" in sys.argv:
        return {"version": PUBLIC_VERSION, "install_requires": ["torch"]}
    return {
        "version": f"{PUBLIC_VERSION}+torch{minor(TORCH)}",
        "install_requires": [f"torch=={minor(TORCH)}.*"],
        "ext_modules": extensions(),
        "cmdclass": {"build_ext": build_command()},
    }


setup(**arguments_of_build(), package_dir={"": "python"}, zip_safe=False)
