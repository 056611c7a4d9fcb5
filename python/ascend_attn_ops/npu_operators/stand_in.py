"""A module in the place of torch_npu: its attention operators, where it cannot be installed."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from ascend_attn_ops._patches import Patch
from ascend_attn_ops.npu_operators.schemas import RELEASE

_NAME = "torch_npu"


class StandIn(ModuleType):
    """Says what it is where anything is asked for that it has not."""

    def __init__(self) -> None:
        super().__init__(_NAME, __doc__)
        self.__version__ = f"{RELEASE}+stand-in"
        # importlib.util.find_spec fails on a module without one.
        self.__spec__ = importlib.machinery.ModuleSpec(_NAME, None, origin=__name__)

    def __getattr__(self, name: str) -> Any:
        operators = sorted(x for x in vars(self) if not x.startswith("__"))
        raise AttributeError(
            f"module {_NAME!r} has no attribute {name!r}: it is a stand-in, which "
            f"ascend_attn_ops.npu_operators made, and has {', '.join(operators)}"
        )


_module = StandIn()


def install(patch: Patch) -> StandIn:
    """Make `import torch_npu` give the stand-in, at first without operators."""
    patch.set_item(sys.modules, _NAME, _module)
    return _module
