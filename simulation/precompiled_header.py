"""Precompiles the headers of torch for both setup.py.

Most C++ files take longer to read these headers than to compile.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

HEADERS = """\
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>
"""


def precompiled(compiler: Any, extension: Any, folder: Path) -> list[str]:
    """Returns flags that make GCC read the headers from a precompiled file in `folder`.

    GCC reads the headers themselves where the file does not fit its other flags. Clang gets no
    flags: it has files of another kind.
    """
    compile_cpp = shlex.split(os.environ.get("CXX", "c++"))
    version = subprocess.run(
        [*compile_cpp, "--version"], capture_output=True, text=True, check=True
    ).stdout
    if "Free Software Foundation" not in version:
        return []
    header = folder.resolve() / "torch_headers.h"
    # The extensions of a package differ in this name alone, and the headers do not use it.
    arguments = [
        x for x in extension.extra_compile_args if not x.startswith("-DTORCH_EXTENSION_NAME")
    ]
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
        subprocess.run(command, check=True)
        flags = [x for x in arguments if not x.startswith(("-I", "-isystem"))]
        header.with_suffix(".h.gch.sum").write_text(json.dumps([made_of, flags], indent=2))
        record.write_text(inputs)
    # For ccache: the .sum file stands for the precompiled one, which differs from build to build.
    os.environ.setdefault("CCACHE_PCH_EXTSUM", "1")
    os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
    # GCC no longer knows that what inlines into our code stands in a system header.
    return ["-include", str(header), "-fpch-preprocess", "-Wno-maybe-uninitialized"]
