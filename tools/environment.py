"""Makes a virtual environment with any torch, and with torch_npu if asked.

The newest torch on the package index of x86-64 is built for CUDA and requires 4 GB of NVIDIA's
libraries, of which a CPU test calls nothing. They are left out here, and empty libraries stand in
for them, so that an environment takes 1.5 GB. It is for tests alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path

TOOLS = ["setuptools>=77,<82", "wheel", "ninja>=1.11"]
TESTS = ["pytest>=8,<10", "pytest-xdist>=3.6,<4", "numpy>=1.26,<3", "expecttest>=0.3,<1"]
# matplotlib for the examples' tests; torch_npu imports yaml.
TESTS += ["matplotlib>=3.8,<4", "pyyaml>=6,<7"]
MODELS = ["transformers>=5.23,<5.25; python_version >= '3.11'", "psutil>=5,<8"]
# Without what it requires: all of it is there, and pip would look after torch's requirements too.
TRAINERS = ["accelerate>=1.1,<2"]
FOR_GPUS = re.compile(r"nvidia|cuda|triton|extra ==")
# Settings that libtorch_npu registers too: torch_npu 2.10 and 2.11 stop at the second of a name.
CONTESTED = (
    b"pinned_reserve_segment_size_mb",
    b"pinned_num_register_threads",
    b"pinned_use_cuda_host_register",
    b"release_lock_on_cudamalloc",
    b"graph_capture_record_stream_reuse",
    b"per_process_memory_fraction",
    b"throw_on_cudamalloc_oom",
)
# Defined by the interpreter or by C++ headers, not by a library of NVIDIA's.
NOT_MISSING = re.compile(r"_?Py|_Z|__|_Unwind")


def output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def install(interpreter: Path, *arguments: str) -> None:
    command = [str(interpreter), "-m", "pip", "install", "-q", "--no-warn-conflicts"]
    subprocess.run([*command, *arguments], check=True)


def site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def needed_by_torch(packages: Path) -> list[str]:
    """Return what the torch of this folder requires, but for GPUs."""
    distribution = next(iter(metadata.distributions(name="torch", path=[str(packages)])))
    return [line for line in distribution.requires or [] if not FOR_GPUS.search(line)]


def with_torch(folder: Path, torch: str, python: str = sys.executable) -> Path:
    """Return the interpreter of an environment with torch, which is made if needed."""
    interpreter, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install(interpreter, *TOOLS)
        install(interpreter, "--no-deps", f"torch=={torch}")
        packages = site_packages(folder)
        install(interpreter, *needed_by_torch(packages))
        stand_in_for_missing_libraries(packages / "torch/lib")
        rename_contested_settings(packages / "torch/lib/libc10_cuda.so")
        ready.touch()
    wanted = "\n".join([*TESTS, *MODELS, *TRAINERS])
    if ready.read_text() != wanted:
        install(interpreter, *TESTS, *MODELS)
        install(interpreter, "--no-deps", *TRAINERS)
        ready.write_text(wanted)
    return interpreter


def with_torch_npu(folder: Path, base: Path, torch_npu: str, python: str = sys.executable) -> Path:
    """Return the interpreter of an environment with torch_npu and all that is in `base`.

    torch_npu is not in `base` itself: where it is installed, `import torch` loads it.
    """
    interpreter, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        packages = site_packages(folder)
        (packages / "base.pth").write_text(f"{site_packages(base)}\n")
        target = f"--target={packages}"
        install(base / "bin/python", "--no-deps", target, f"torch_npu=={torch_npu}")
        ready.touch()
    return interpreter


def with_both(home: Path, spec: str, python: str = sys.executable) -> tuple[Path, Path | None]:
    """Return the interpreters with the torch of TORCH[:TORCH_NPU], and with its torch_npu."""
    torch, _, torch_npu = spec.partition(":")
    base = home / torch / "environment"
    interpreter = with_torch(base, torch, python)
    npu = home / spec.replace(":", "-") / "npu"
    return interpreter, with_torch_npu(npu, base, torch_npu, python) if torch_npu else None


def rename_contested_settings(library: Path) -> None:
    """Make the CUDA half of torch register other names than torch_npu."""
    if not library.exists():
        return
    content = library.read_bytes()
    for name in CONTESTED:
        # Compilers store a name in pieces of 16 bytes.
        content = content.replace(name[:16], name[:1].upper() + name[1:16])
    library.write_bytes(content)


def stand_in_for_missing_libraries(folder: Path) -> None:
    """Write libraries that define what torch's own libraries look for in NVIDIA's."""
    libraries = sorted(folder.glob("*.so*"))
    present = {library.name for library in libraries}
    # For each missing library, the versions of its symbols.
    missing: dict[str, set[str]] = {}
    defined: set[str] = set()
    wanted: set[str] = set()
    for library in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", library))
        for name in needed:
            if name not in present and not is_of_the_system(name):
                missing.setdefault(name, set())
        for name, versions in versions_needed(library).items():
            if name in missing:
                missing[name] |= versions
        for line in output("nm", "-D", "--with-symbol-versions", library).splitlines():
            kind, symbol = line.split()[-2:]
            if kind == "U":
                wanted.add(symbol)
            else:
                defined.add(symbol.split("@")[0])
    owners = {version: name for name, versions in missing.items() for version in versions}
    symbols: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    # Which library has a symbol without a version cannot be told: each of them has all.
    unversioned = [name for name, versions in missing.items() if not versions]
    for symbol in sorted(wanted):
        name, _, version = symbol.partition("@")
        if name in defined or (not version and NOT_MISSING.match(name)):
            continue
        for owner in unversioned if not version else filter(None, [owners.get(version)]):
            symbols[owner].append((name, version))
    for library_name, versions in missing.items():
        write_library(folder / library_name, symbols[library_name], versions)


def is_of_the_system(library: str) -> bool:
    folders = output("ldconfig", "-p") if os.path.exists("/sbin/ldconfig") else ""
    return library in folders or library.startswith(("ld-linux", "libc.", "libm.", "libstdc++"))


def versions_needed(library: Path) -> dict[str, set[str]]:
    """For each library that another needs, the versions of symbols."""
    versions: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in output("readelf", "-VW", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            current = versions.setdefault(found.group(1), set())
        elif found := re.search(r"Name: (\S+)\s+Flags", line):
            current.add(found.group(1))
    return versions


def body_of(function: str) -> str:
    if function.endswith(("String", "Name", "LastError")):
        return "0" if function.endswith("LastError") else '(long)"stand-in"'
    return "100"  # cudaErrorNoDevice


def write_library(path: Path, symbols: list[tuple[str, str]], versions: set[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source, script = Path(temporary, "library.c"), Path(temporary, "versions")
        source.write_text(
            "".join(f"long {name}(void) {{ return {body_of(name)}; }}\n" for name, _ in symbols)
        )
        blocks = []
        for version in sorted(versions):
            names = "".join(f"{name}; " for name, owner in symbols if owner == version)
            blocks.append(f"{version} {{ {'global: ' + names if names else ''}}};\n")
        script.write_text("".join(blocks))
        options = [f"-Wl,--version-script={script}"] if versions else []
        flags = ["-shared", "-fPIC", "-w", "-nostdlib", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        subprocess.run(["cc", *flags, source, *options, "-o", path], check=True)
