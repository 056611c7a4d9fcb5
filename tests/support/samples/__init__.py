"""Sample calls of every operator, and calls that each must refuse.

A module of this package adds operators with a list OPERATORS, and wrong calls with a list
WRONG_CALLS: there is no other list.
"""

from __future__ import annotations

import importlib
import pkgutil

from .record import Gradient, Operator, Recipe
from .sample import Sample, as_tuple, bytes_of, named_tensors
from .sparse import SparseCase
from .wrong_call import WrongCall

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]

OPERATORS: dict[str, Operator] = {
    operator.name: operator for module in _MODULES for operator in getattr(module, "OPERATORS", ())
}

WRONG_CALLS: list[WrongCall] = [
    row for module in _MODULES for row in getattr(module, "WRONG_CALLS", ())
]

# The calls that return what they compute. Tests of their own run those that work in place.
RECIPES: list[Recipe] = [
    recipe
    for operator in OPERATORS.values()
    if not operator.in_place
    for recipe in operator.recipes
]

SPARSE_OPERATORS = [x for x in OPERATORS.values() if isinstance(x.cases[0], SparseCase)]

# What autograd differentiates, and the first of each operator.
DIFFERENTIABLE_RECIPES = [recipe for recipe in RECIPES if recipe.differentiable]
FIRST_DIFFERENTIABLE = list(
    {recipe.operator.name: recipe for recipe in reversed(DIFFERENTIABLE_RECIPES)}.values()
)[::-1]

__all__ = [
    "DIFFERENTIABLE_RECIPES",
    "FIRST_DIFFERENTIABLE",
    "OPERATORS",
    "RECIPES",
    "SPARSE_OPERATORS",
    "WRONG_CALLS",
    "Gradient",
    "Operator",
    "Recipe",
    "Sample",
    "WrongCall",
    "as_tuple",
    "bytes_of",
    "named_tensors",
]
