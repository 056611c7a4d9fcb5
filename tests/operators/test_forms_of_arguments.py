"""Other forms of the same arguments: int64, lists of lengths, masks that are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ascend_attn_ops.check.samples.sample import with_lists
from support.samples import RECIPES, Recipe
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("no_limits")

COMPRESSED = (2, 3, 4, 6, 7, 8)


def integers(recipe: Recipe) -> tuple[str, ...]:
    tensors = recipe.make(torch.float16).tensors
    return (recipe.operator.name, *(n for n, x in tensors.items() if x.dtype == torch.int32))


def parametrized(key: Callable[[Recipe], tuple[object, ...]]) -> pytest.MarkDecorator:
    """The first recipe of each key that has more than the operator's name."""
    first = {key(recipe): recipe for recipe in reversed(RECIPES)}
    recipes = [recipe for found, recipe in first.items() if len(found) > 1]
    return pytest.mark.parametrize("recipe", recipes, ids=lambda x: x.id)


@parametrized(integers)
def test_int64_is_int32(recipe: Recipe) -> None:
    sample = recipe.make(torch.float16)
    wide = sample.map(lambda x: x.long() if x.dtype == torch.int32 else x)
    assert_same_bits(wide.clone().call(torch.ops.ascend), sample.clone().call(torch.ops.ascend))


@parametrized(integers)
def test_what_int32_does_not_hold_is_out_of_range(recipe: Recipe) -> None:
    sample = recipe.make(torch.float16)
    for name in integers(recipe)[1:]:
        x = sample.tensors[name]
        if x.numel() == 0 or name == "slot_mapping":
            continue
        wrong = sample.replace(**{name: x.long() + 2**32})  # the same in 32 bits
        with pytest.raises(ValueError, match=rf"{sample.operator}: {name}: "):
            wrong.call(torch.ops.ascend)


def compressed(recipe: Recipe) -> tuple[object, ...]:
    options = recipe.make(torch.float16).options
    mode = options.get("sparse_mode")
    given = mode in COMPRESSED and options.get("atten_mask") is not None
    return (recipe.operator.name, *((mode, recipe.layout) if given else ()))


@parametrized(compressed)
def test_the_compressed_mask_may_be_left_out(recipe: Recipe) -> None:
    sample = recipe.make(torch.float16)
    without = sample.replace(atten_mask=None)
    assert_same_bits(without.call(torch.ops.ascend), sample.call(torch.ops.ascend))


def listed(recipe: Recipe) -> tuple[str, ...]:
    name, options = recipe.operator.name, recipe.make(torch.float16).options
    if "list" not in getattr(torch.ops.ascend, name).overloads():
        return (name,)
    lists = with_lists(options)
    return (name, *(x for x in options if lists[x] is not options[x]))


@parametrized(listed)
def test_lists_are_tensors(recipe: Recipe) -> None:
    sample = recipe.make(torch.float16)
    lists = sample.replace(**with_lists(sample.options))
    assert_same_bits(lists.call(torch.ops.ascend), sample.call(torch.ops.ascend))
