"""Checks what the libraries were compiled with, before torch_npu is loaded on them."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path

_INSTALL = "pip install --no-build-isolation ./simulation"


def check() -> None:
    """Raise ImportError where torch_npu is missing, or the libraries were built with others."""
    if importlib.util.find_spec("torch_npu") is None:
        minor = _minor(metadata.version("torch"))
        raise ModuleNotFoundError(
            f"torch_npu is not installed: pip install --no-deps 'torch_npu=={minor}.*' pyyaml",
            name="torch_npu",
        )
    record = Path(__file__).with_name("built_with.json")
    if not record.exists():
        raise ImportError(f"the simulated CANN is not built: {_INSTALL}")
    for package, built in json.loads(record.read_text()).items():
        here = metadata.version(package)
        if _minor(built) != _minor(here):
            raise ImportError(
                f"the simulated CANN was built with {package} {built}, and {package} {here} is "
                f"installed; install it again: {_INSTALL}"
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
