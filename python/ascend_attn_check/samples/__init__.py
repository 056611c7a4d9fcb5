"""Sample calls of every operator, as the tests and `python -m ascend_attn_check` run them.

A module of this package adds operators with a list OPERATORS: there is no other list.
"""

from __future__ import annotations

import importlib
import pkgutil

from ascend_attn_check.samples.record import Gradient, Operator, Recipe

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]

OPERATORS: dict[str, Operator] = {
    operator.name: operator for module in _MODULES for operator in getattr(module, "OPERATORS", ())
}

__all__ = ["OPERATORS", "Gradient", "Operator", "Recipe"]
