"""One call of each operator that the device accepts: within its limits, value the same as key."""

from __future__ import annotations

from samples import OPERATORS, RECIPES, Recipe, Sample

# The first recipe of each operator, in each layout, with the sizes of the device.
DEVICE_RECIPES: list[Recipe] = [
    recipe
    for operator in OPERATORS
    for recipe in RECIPES
    if recipe.operator == operator and recipe.case.k >= 1024
]


def first(operator: str) -> Recipe:
    return next(recipe for recipe in DEVICE_RECIPES if recipe.operator == operator)


def to_npu(sample: Sample, device: str = "npu:0") -> Sample:
    return sample.to(device)
