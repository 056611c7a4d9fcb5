"""The sample calls of the package, and calls that each operator must refuse.

A module of this package adds wrong calls with a list WRONG_CALLS: there is no other list.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

from ascend_attn_check.samples import OPERATORS, Gradient, Operator, Recipe  # noqa: F401
from ascend_attn_check.samples.attention_update import UpdateCase
from ascend_attn_check.samples.fused_infer_attention_score import InferCase
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_flash_mla import MlaCase
from ascend_attn_ops.reference.call import Sample, as_tuple, bytes_of, named_tensors  # noqa: F401

from .wrong_call import WrongCall

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]

WRONG_CALLS: list[WrongCall] = [
    row for module in _MODULES for row in getattr(module, "WRONG_CALLS", ())
]

# The calls that return what they compute. Tests of their own run those that work in place.
RECIPES = [r for operator in OPERATORS.values() if not operator.in_place for r in operator.recipes]

SPARSE_OPERATORS = [x for x in OPERATORS.values() if isinstance(x.cases[0], SparseCase)]

# Recipes that autograd differentiates, and the first of each operator.
DIFFERENTIABLE_RECIPES = [recipe for recipe in RECIPES if recipe.differentiable]
FIRST_DIFFERENTIABLE = [
    x.recipes[0] for x in OPERATORS.values() if x.recipes[0] in DIFFERENTIABLE_RECIPES
]


def resized(recipe: Recipe) -> Recipe:
    """Other sizes along the dimensions that torch.compile may treat as dynamic."""
    return replace(recipe, case=replace(recipe.case, **_other_sizes(recipe.case)))


def _other_sizes(case: Any) -> dict[str, Any]:
    if isinstance(case, UpdateCase):
        return {"rows": (case.rows[0] + 3, *case.rows[1:])}
    if isinstance(case, InferCase) and case.packed:
        (*queries, last_query), (*keys, last_key) = (lengths or () for lengths in case.lengths)
        return {"lengths": ((*queries, last_query + 6), (*keys, last_key + 8))}
    if isinstance(case, SparseCase) and case.ratio > 1 and not (case.residuals or case.lengths):
        # The keys are those of the queries.
        return {"b": case.b + 1, "s": (case.s[0] + 8 * case.ratio, case.s[1] + 8)}
    if case.layout == "TND":
        return {"tail": tuple(x + y for x, y in zip(case.tail, (6, 4, 5), strict=False))}
    if isinstance(case, MlaCase):
        queries, keys, compressed = case.s
        if case.lengths is not None:
            return {"s": (queries + 6, keys + 8, compressed + 4)}
        s = queries + 6, keys + 8 * case.ratio, compressed + 8
        return {"b": case.b + (case.residual is None), "s": s}
    fixed = isinstance(case, SparseCase) and (case.lengths or case.residuals)
    return {"b": case.b + (not fixed), "s": (case.s[0] + 6, case.s[1] + 8)}
