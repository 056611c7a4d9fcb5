"""Imports torch, and checks what the extension modules were compiled with before they are loaded.

Another torch lacks some of the symbols that they need, and the loader would name one of them.

Where torch_npu is installed, `import torch` would import it, which fails where there is no CANN.
`library` loads torch_npu later, and says why it cannot. Other backends load as they would.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_given = os.environ.get(_AUTOLOAD)
# Whether importing torch would load the backends that are installed, and this package does instead.
autoloads = "torch" not in sys.modules and _given in (None, "1")
os.environ[_AUTOLOAD] = "0"
try:
    import torch
finally:
    del os.environ[_AUTOLOAD]
    if _given is not None:
        os.environ[_AUTOLOAD] = _given
if autoloads:
    for _backend in metadata.entry_points(group="torch.backends"):
        if _backend.name != "torch_npu":
            _backend.load()()

_REMEDY = "install it again in this environment: pip install --no-build-isolation --no-deps ."


def versions(module: str) -> dict[str, str]:
    """Return the versions of torch and torch_npu with which `_C` or `_npu` was compiled."""
    record = Path(__file__).parents[1] / "built_with.json"
    found: dict[str, dict[str, str]] = json.loads(record.read_text()) if record.exists() else {}
    return found.get(module, {})


def installed(package: str) -> str:
    """Return the version of torch or torch_npu in this environment."""
    return str(torch.__version__) if package == "torch" else metadata.version(package)


def mismatch(module: str) -> str | None:
    """Return why `_C` or `_npu` cannot be loaded here, in one line; None if it can."""
    if importlib.util.find_spec(f"ascend_attn_ops.{module}") is None or not versions(module):
        python = ".".join(map(str, sys.version_info[:2]))
        return f"ascend_attn_ops.{module} is not built (for Python {python}); {_REMEDY}"
    return difference(module, minor)


def difference(module: str, part: Callable[[str], str] = str) -> str | None:
    """Return which version differs in `part` from that with which `module` was compiled."""
    for package, built in versions(module).items():
        here = installed(package)
        if part(built) != part(here):
            return (
                f"ascend_attn_ops.{module} was built with {package} {built}, and {package} {here} "
                f"is installed; {_REMEDY}"
            )
    return None


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_core() -> None:
    if reason := mismatch("_C"):
        raise ImportError(reason)


# At import, and before any other module of the package imports `_C`.
check_core()
