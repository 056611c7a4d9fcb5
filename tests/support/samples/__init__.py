"""The sample calls of the package, and calls that each operator must refuse.

A module of this package adds wrong calls with a list WRONG_CALLS: there is no other list.
"""

from __future__ import annotations

import importlib
import pkgutil

from ascend_attn_check.samples import (  # noqa: F401
    DIFFERENTIABLE_RECIPES,
    FIRST_DIFFERENTIABLE,
    OPERATORS,
    RECIPES,
    SPARSE_OPERATORS,
    Gradient,
    Operator,
    Recipe,
    Sample,
    as_tuple,
    bytes_of,
    named_tensors,
)

from .wrong_call import WrongCall

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]

WRONG_CALLS: list[WrongCall] = [
    row for module in _MODULES for row in getattr(module, "WRONG_CALLS", ())
]
