"""Modules in the place of torch_npu and others: their operators, where they are not installed."""

from __future__ import annotations

import importlib.machinery
import sys
from functools import cache
from types import ModuleType
from typing import Any

from ascend_attn_ops._core.patches import Patch


class StandIn(ModuleType):
    """Says what it is where anything is asked for that it has not."""

    def __init__(self, name: str, release: str) -> None:
        super().__init__(name, __doc__)
        self.__version__ = f"{release}+stand-in"
        # importlib.util.find_spec fails on a module without one.
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__name__)

    def __getattr__(self, name: str) -> Any:
        operators = sorted(x for x in vars(self) if not x.startswith("__"))
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}: it is a stand-in, which "
            f"ascend_attn_ops.torch_npu made, and has {', '.join(operators)}"
        )


@cache
def _module(name: str, release: str) -> StandIn:
    return StandIn(name, release)


def install(name: str, release: str, patch: Patch) -> StandIn:
    """Make an import of the module give a stand-in, at first without operators."""
    module = _module(name, release)
    patch.set_item(sys.modules, name, module)
    parent, _, attribute = name.rpartition(".")
    if parent:
        patch.set_attribute(install(parent, release, patch), attribute, module)
    return module
