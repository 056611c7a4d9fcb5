"""Precompiles the headers of torch for both setup.py.

Most C++ files take longer to read these headers than to compile.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
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

    GCC reads the headers themselves where the file does not fit its other flags. Clang and ccache
    get no flags: Clang has files of another kind, and ccache would compare the file with those of
    earlier builds instead of the headers.
    """
    compile_cpp = shlex.split(os.environ.get("CXX", "c++"))
    version = subprocess.run(
        [*compile_cpp, "--version"], capture_output=True, text=True, check=True
    ).stdout
    if "Free Software Foundation" not in version or shutil.which("ccache"):
        return []
    header = folder.resolve() / "torch_headers.h"
    command = [
        *compile_cpp,
        *compiler.compiler_so[1:],
        *(f"-I{path}" for path in [*extension.include_dirs, *compiler.include_dirs]),
        # The extensions of a package differ in this name alone, and the headers do not use it.
        *(x for x in extension.extra_compile_args if not x.startswith("-DTORCH_EXTENSION_NAME")),
        *("-x", "c++-header", str(header), "-o", f"{header}.gch"),
    ]
    inputs = json.dumps([HEADERS, version, metadata.version("torch"), command], indent=2)
    record = header.with_suffix(".json")
    if not record.exists() or record.read_text() != inputs:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(HEADERS)
        subprocess.run(command, check=True)
        record.write_text(inputs)
    # GCC no longer knows that what inlines into our code stands in a system header.
    return ["-include", str(header), "-Wno-maybe-uninitialized"]
