"""Sample calls of every operator, with the bound on every output.

A module of this package adds operators with a list OPERATORS: there is no other list. The tests and
`python -m ascend_attn_check` run them.
"""

from __future__ import annotations

import importlib
import pkgutil

from ascend_attn_ops.reference.call import Sample, as_tuple, bytes_of, named_tensors, sample_of

from ascend_attn_check.samples.record import Gradient, Operator, Recipe
from ascend_attn_check.samples.sparse import SparseCase

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]

OPERATORS: dict[str, Operator] = {
    operator.name: operator for module in _MODULES for operator in getattr(module, "OPERATORS", ())
}

# The calls that return what they compute. Tests of their own run those that work in place.
RECIPES: list[Recipe] = [
    recipe
    for operator in OPERATORS.values()
    if not operator.in_place
    for recipe in operator.recipes
]

SPARSE_OPERATORS = [x for x in OPERATORS.values() if isinstance(x.cases[0], SparseCase)]

# Recipes that autograd differentiates, and the first of each operator.
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
    "Gradient",
    "Operator",
    "Recipe",
    "Sample",
    "as_tuple",
    "bytes_of",
    "named_tensors",
    "sample_of",
]
