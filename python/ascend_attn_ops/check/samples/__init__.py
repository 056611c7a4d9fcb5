"""Sample calls of every operator, with the bound on every output.

A module of this package adds operators with a list OPERATORS: there is no other list. The tests and
`python -m ascend_attn_ops check` run them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from ascend_attn_ops.check.samples.record import Gradient, Operator, Recipe
from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.reference.call import Sample, as_tuple, bytes_of, named_tensors

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


def sample_of(operator: str, id: str, arguments: Mapping[str, Any]) -> Sample:
    """Build a sample from the named arguments of a file.

    Raises:
        ValueError: there is no such operator or argument, or a positional argument is missing.
    """
    if operator not in OPERATORS:
        raise ValueError(f"there is no operator {operator!r}")
    schema = OPERATORS[operator].overload._schema.arguments
    if unknown := arguments.keys() - {x.name for x in schema}:
        raise ValueError(f"{operator} has no argument {', '.join(sorted(unknown))}")
    positional = [x.name for x in schema if not x.kwarg_only]
    if missing := [name for name in positional if name not in arguments]:
        raise ValueError(f"{operator} needs an argument {', '.join(missing)}")
    return Sample(
        operator,
        id,
        {name: arguments[name] for name in positional},
        {name: x for name, x in arguments.items() if name not in positional},
    )


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
