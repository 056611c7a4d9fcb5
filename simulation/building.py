"""For both setup.py: builds that compile less, and print shorter lines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

HEADERS = """\
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>
"""


COMMAND = re.compile(rb"(\[\d+/\d+\]) .* -c (\S+) -o .*\n")


@contextlib.contextmanager
def short_lines() -> Iterator[None]:
    """Prints the number and the name of a file in the place of the command that compiles it.

    torch always asks ninja for the commands. Warnings and errors are printed as they are.
    """

    def copy() -> None:
        with open(reading, "rb") as lines:
            for line in lines:
                if match := COMMAND.fullmatch(line):
                    number, file = match.groups()
                    line = b"%s %s\n" % (number, os.path.relpath(file))
                if line != b"ninja: no work to do.\n":
                    os.write(stdout, line)

    sys.stdout.flush()
    stdout = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    copying = Thread(target=copy)
    copying.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        copying.join()
        os.close(stdout)


def units(sources: list[str], folders: Iterable[str], into: Path) -> list[str]:
    """Returns the sources, those of each folder as one file in `into` that includes them.

    Most take longer to read headers than to compile. Unnamed namespaces of a folder share names.
    """
    made = {folder: into / f"{folder.replace('/', '_')}.cpp" for folder in folders}
    for folder, unit in made.items():
        names = (x.removeprefix("csrc/") for x in sources if os.path.dirname(x) == folder)
        text = "".join(f'#include "{x}"\n' for x in names)
        if not unit.exists() or unit.read_text() != text:
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
    return [*map(str, made.values()), *(x for x in sources if os.path.dirname(x) not in made)]


def precompiled(compiler: Any, extension: Any, folder: Path) -> list[str]:
    """Returns flags that make GCC read the headers from a precompiled file in `folder`.

    GCC reads the headers themselves where its other flags do not fit. Clang gets no flags.
    """
    compile_cpp = shlex.split(os.environ.get("CXX", "c++"))
    version = subprocess.run(
        [*compile_cpp, "--version"], capture_output=True, text=True, check=True
    ).stdout
    if "Free Software Foundation" not in version:
        return []
    # For ccache: the .sum file stands for the precompiled one, which differs from build to build.
    os.environ.setdefault("CCACHE_PCH_EXTSUM", "1")
    os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
    header = folder.resolve() / "torch_headers.h"
    # The headers do not use these: extensions of a package, and builds for other processors,
    # differ in them alone.
    unused = ("-DTORCH_EXTENSION_NAME", "-DASCEND_ATTN_OPS_VECTOR_UNIT")
    arguments = [x for x in extension.extra_compile_args if not x.startswith(unused)]
    command = [
        *compile_cpp,
        *compiler.compiler_so[1:],
        *(f"-I{path}" for path in [*extension.include_dirs, *compiler.include_dirs]),
        *arguments,
        *("-x", "c++-header", str(header), "-o", f"{header}.gch"),
    ]
    made_of = [HEADERS, version, metadata.version("torch")]
    inputs = json.dumps([made_of, command], indent=2)
    record = header.with_suffix(".json")
    if not record.exists() or record.read_text() != inputs:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(HEADERS)
        print("Precompiling the headers of torch", flush=True)
        wrapper = [] if shutil.which("ccache") is None else ["ccache"]
        subprocess.run([*wrapper, *command], check=True)
        flags = [x for x in arguments if not x.startswith(("-I", "-isystem"))]
        header.with_suffix(".h.gch.sum").write_text(json.dumps([made_of, flags], indent=2))
        record.write_text(inputs)
    # GCC no longer knows that what inlines into our code stands in a system header.
    return ["-include", str(header), "-fpch-preprocess", "-Wno-maybe-uninitialized"]
