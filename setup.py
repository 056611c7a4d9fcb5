"""Builds the extension modules: `_C` always, `_npu` where torch_npu can be imported."""

from __future__ import annotations

import glob
import importlib.util
import os
from pathlib import Path

# With torch_npu installed, importing torch loads it, which fails on a machine without CANN.
# Building needs only its headers and libraries.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
COMPILE_ARGS = ["-std=c++20", "-O3", "-fopenmp", "-g0", "-Wall"]


def sources(*, npu: bool) -> list[str]:
    """Return the C++ files below csrc/npu, or all others."""
    found = sorted(glob.glob("csrc/**/*.cpp", root_dir=ROOT, recursive=True))
    return [source for source in found if source.startswith("csrc/npu/") == npu]


def core_extension() -> CppExtension:
    """Schemas, checks, and the CPU, Meta and autograd kernels: needs torch alone."""
    return CppExtension(
        "ascend_attn_ops._C",
        sources(npu=False),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=COMPILE_ARGS,
    )


def npu_extension() -> CppExtension | None:
    """The NPU kernels, compiled against the headers of the installed torch_npu."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None or not sources(npu=True):
        return None
    torch_npu = Path(spec.origin).parent
    # System headers, to silence warnings that are not ours.
    includes = ["", "/third_party/op-plugin", "/third_party/acl/inc"]
    return CppExtension(
        "ascend_attn_ops._npu",
        sources(npu=True),
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=[str(torch_npu / "lib")],
        libraries=["torch_npu"],
        extra_compile_args=[
            *COMPILE_ARGS,
            *(f"-isystem{torch_npu}/include{folder}" for folder in includes),
            # The torch version, in the form that torch_npu's headers expect.
            f"-DCURRENT_VERSION=V{'R'.join(torch.__version__.split('.')[:2])}",
        ],
        extra_link_args=["-Wl,-rpath,$ORIGIN"],
    )


class Build(BuildExtension):
    """Links `_npu` against `_C`, which provides its schemas, checks and limits."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name.endswith("._npu"):
            core = Path(self.get_ext_fullpath("ascend_attn_ops._C"))
            ext.library_dirs.append(str(core.parent))
            ext.extra_link_args.append(f"-l:{core.name}")
        super().build_extension(ext)


def extensions() -> list[Extension]:
    """Return the extensions that ASCEND_ATTN_OPS_BUILD names, by default both.

    The Makefile builds `_npu` alone, next to a `_C` built with the same torch, and installs with
    neither: pip would compile out of sight, and again each time.
    """
    wanted = os.environ.get("ASCEND_ATTN_OPS_BUILD", "core,npu").split(",")
    core = core_extension() if "core" in wanted else None
    npu = npu_extension() if "npu" in wanted else None
    return [extension for extension in (core, npu) if extension]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
    package_dir={"": "python"},
    zip_safe=False,
)
