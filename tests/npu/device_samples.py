"""One call of each operator that the device accepts: within its limits, value the same as key."""

from __future__ import annotations

from samples import RECIPES, Recipe, Sample, flash_attention_score, prompt_flash_attention


def on_device(recipe: Recipe) -> bool:
    """Within the limits; of dense attention, one call in each layout and one of each form."""
    if recipe.operator == "prompt_flash_attention":
        return recipe.case in PROMPT_FLASH_ATTENTION
    if not recipe.operator.startswith("flash_attention_score"):
        return recipe.case.k >= 1024
    return recipe.case in FLASH_ATTENTION


# Not too many: all of them are in test_npu_equals_cpu.py and test_npu_conformance.py.
FLASH_ATTENTION = [
    case
    for case in flash_attention_score.CASES
    if case.keep_prob == 1 and all(all(pair) for pair in case.sequences) and max(case.s) < 1000
][::2]

PROMPT_FLASH_ATTENTION = [
    case
    for case in prompt_flash_attention.CASES
    if case.b > 0 and all(case.s) and max(case.s) < 300
][::2]

DEVICE_RECIPES: list[Recipe] = [recipe for recipe in RECIPES if on_device(recipe)]


def first(operator: str) -> Recipe:
    return next(recipe for recipe in DEVICE_RECIPES if recipe.operator == operator)


def to_npu(sample: Sample, device: str = "npu:0") -> Sample:
    return sample.to(device)
