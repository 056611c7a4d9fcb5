"""Builds the libraries of the simulated CANN: `python -m tests.cann_sim.build`."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import BUILD, ROOT, package_folder

SOURCES = Path(__file__).parent
REPOSITORY = SOURCES.parents[1]
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-Wall"]
# torch_npu's libraries name them all; the simulation keeps every function in libascendcl.so.
EMPTY = ["hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel"]


def is_newer(target: Path, sources: list[Path]) -> bool:
    return target.exists() and all(
        target.stat().st_mtime >= source.stat().st_mtime for source in sources
    )


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def include_flags() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    torch_npu = package_folder("torch_npu")
    folders = [REPOSITORY / "csrc", torch_npu / "include/third_party/acl/inc", *include_paths()]
    return [f"-I{folder}" for folder in folders]


def compile_all(sources: list[Path], include: list[str]) -> list[Path]:
    headers = sorted(SOURCES.glob("*.h"))

    def compile_one(source: Path) -> Path:
        target = BUILD / f"{source.stem}.o"
        if not is_newer(target, [source, *headers]):
            run("g++", *FLAGS, *include, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def trivial_functions() -> Path:
    """A source file with one function for every name of trivial_functions.txt."""
    lines = (SOURCES / "trivial_functions.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    source = BUILD / "trivial_functions.cpp"
    text = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


def shared_library(name: str, objects: list[Path], *options: str) -> None:
    run(
        "g++", "-shared", f"-L{BUILD}", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}",
        "-Wl,--no-as-needed", *objects, *options, "-o", BUILD / name,
    )  # fmt: skip


def build_runtime(include: list[str]) -> None:
    shared_library(
        "libascendcl.so", compile_all([SOURCES / "runtime.cpp", trivial_functions()], include)
    )
    for name in EMPTY:
        shared_library(f"lib{name}.so", [], "-lascendcl")


def build_opapi(include: list[str]) -> None:
    """libopapi.so computes with this project's CPU kernels: it is linked to the package's _C."""
    from torch.utils.cpp_extension import library_paths

    core = next((REPOSITORY / "python/ascend_attn_ops").glob("_C.*.so"))
    shared_library(
        "libopapi.so",
        compile_all(sorted(SOURCES.glob("opapi*.cpp")), include),
        *(f"-L{path}" for path in [*library_paths(), core.parent]),
        "-lascendcl", "-ltorch_cpu", "-lc10", f"-l:{core.name}", f"-Wl,-rpath,{core.parent}",
    )  # fmt: skip


def build() -> None:
    # With torch_npu installed, importing torch loads it, which fails until the libraries are there.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # The folders that torch_npu expects below ASCEND_HOME_PATH.
    for folder in (BUILD, ROOT / "runtime", ROOT / "compiler", ROOT / "opp"):
        folder.mkdir(parents=True, exist_ok=True)
    include = include_flags()
    build_runtime(include)
    build_opapi(include)
    # A CANN without the operator library, for the tests of what is missing.
    without = ROOT / "without_opapi"
    without.mkdir(exist_ok=True)
    for library in BUILD.glob("lib*.so"):
        if library.name != "libopapi.so" and not (without / library.name).exists():
            (without / library.name).symlink_to(library)


if __name__ == "__main__":
    build()
