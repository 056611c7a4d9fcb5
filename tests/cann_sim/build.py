"""Builds the libraries of the simulated CANN: `python -m tests.cann_sim.build`."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import BUILD, ROOT, WITHOUT, package_folder

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

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        return list(pool.map(compile_one, sources))


def write(target: Path, text: str) -> Path:
    """Leaves a file alone that has this content: it is no reason to build anything."""
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return target


def trivial_functions() -> Path:
    """A source file with one function for every name of trivial_functions.txt."""
    lines = (SOURCES / "trivial_functions.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    text = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names)
    return write(BUILD / "trivial_functions.cpp", text)


def shared_library(target: Path, objects: list[Path], *options: str) -> None:
    run(
        "g++", "-shared", f"-L{BUILD}", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{target.name}",
        "-Wl,--no-as-needed", *objects, *options, "-o", target,
    )  # fmt: skip


def build_runtime(include: list[str]) -> None:
    objects = compile_all([SOURCES / "runtime.cpp", trivial_functions()], include)
    shared_library(BUILD / "libascendcl.so", objects)
    for name in EMPTY:
        shared_library(BUILD / f"lib{name}.so", [], "-lascendcl")


def exports_without(folder: Path, functions: tuple[str, ...]) -> Path:
    """A linker script that keeps functions out of a library."""
    names = " ".join(f"{name}; {name}GetWorkspaceSize;" for name in functions)
    return write(folder / "exports.map", f"{{ global: *; local: {names} }};\n")


def build_opapi(include: list[str]) -> None:
    """libopapi.so computes with this project's CPU kernels: it is linked to the package's _C."""
    from torch.utils.cpp_extension import library_paths

    core = next((REPOSITORY / "python/ascend_attn_ops").glob("_C.*.so"))
    objects = compile_all(sorted(SOURCES.glob("opapi*.cpp")), include)
    options = [
        *(f"-L{path}" for path in [*library_paths(), core.parent]),
        "-lascendcl", "-ltorch_cpu", "-lc10", f"-l:{core.name}", f"-Wl,-rpath,{core.parent}",
    ]  # fmt: skip
    target = BUILD / "libopapi.so"
    shared_library(target, objects, *options)
    for name, functions in WITHOUT.items():
        folder = ROOT / name
        folder.mkdir(exist_ok=True)
        exports = exports_without(folder, functions)
        if not is_newer(folder / target.name, [*objects, exports, core]):
            script = f"-Wl,--version-script={exports}"
            shared_library(folder / target.name, objects, *options, script)


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
