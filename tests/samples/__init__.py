"""Sample calls of every operator: one generator per family, listed in RECIPES."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import (
    flash_attention_score,
    lightning_indexer,
    prompt_flash_attention,
    scatter_pa_kv_cache,
    sparse_flash_attention,
    sparse_lightning_indexer_grad_kl_loss,
)
from .sample import Recipe, Sample, as_tuple

RECIPES: list[Recipe] = [
    *lightning_indexer.RECIPES,
    *sparse_flash_attention.RECIPES,
    *sparse_lightning_indexer_grad_kl_loss.RECIPES,
    *flash_attention_score.RECIPES,
    *prompt_flash_attention.RECIPES,
]

OPERATORS = list(dict.fromkeys(recipe.operator for recipe in RECIPES))

# Those of RECIPES, which return what they compute, and those that work in place.
ALL_OPERATORS = [*OPERATORS, scatter_pa_kv_cache.OPERATOR]

# What autograd differentiates, and with respect to what.
DIFFERENTIABLE: dict[str, tuple[str, ...]] = {
    "lightning_indexer": ("query", "key", "weights"),
    "sparse_flash_attention": ("query", "key", "value", "query_rope", "key_rope"),
    "sparse_lightning_indexer_grad_kl_loss": ("query_index", "key_index", "weights"),
    "flash_attention_score": ("query", "key", "value"),
}

# The output that carries the gradient.
DIFFERENTIABLE_OUTPUT: dict[str, int] = {
    "lightning_indexer": 1,
    "sparse_flash_attention": 0,
    "sparse_lightning_indexer_grad_kl_loss": 3,
    "flash_attention_score": 0,
}


def samples(operator: str, dtype: torch.dtype) -> Iterator[Sample]:
    return (recipe.make(dtype) for recipe in RECIPES if recipe.operator == operator)


def small_sample(operator: str) -> Sample:
    """A call in bfloat16."""
    if operator == scatter_pa_kv_cache.OPERATOR:
        return scatter_pa_kv_cache.build(scatter_pa_kv_cache.CASES[0], torch.bfloat16)
    return next(samples(operator, torch.bfloat16))


__all__ = [
    "ALL_OPERATORS",
    "DIFFERENTIABLE",
    "DIFFERENTIABLE_OUTPUT",
    "OPERATORS",
    "RECIPES",
    "Recipe",
    "Sample",
    "as_tuple",
    "small_sample",
]
