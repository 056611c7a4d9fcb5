"""Other forms of the same arguments: int64, lists of lengths, masks that are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.sparse import ALL_TOKENS, LENGTHS
from ascend_attn_ops.reference.call import LENGTHS_ON_HOST
from support.samples import OPERATORS, RECIPES, SPARSE_OPERATORS, Operator, Recipe, Sample, as_tuple
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

COMPRESSED = (2, 3, 4, 6, 7, 8)


def lists(sample: Sample) -> dict[str, list[int]]:
    """Its lengths in tensors, by name."""
    given = ((name, sample.options.get(name)) for name in LENGTHS_ON_HOST)
    return {name: x.tolist() for name, x in given if isinstance(x, Tensor)}


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
    name = recipe.operator.name
    has_list = "list" in getattr(torch.ops.ascend, name).overloads()
    return (name, *(lists(recipe.make(torch.float16)) if has_list else ()))


@parametrized(listed)
def test_lists_are_tensors(recipe: Recipe) -> None:
    sample = recipe.make(torch.float16)
    listed = sample.replace(**lists(sample))
    assert_same_bits(listed.call(torch.ops.ascend), sample.call(torch.ops.ascend))


# Lengths as a list or as a tensor, in every public function that takes them.

np = pytest.importorskip("numpy", reason="numpy is not installed")


def has_lengths(recipe: Recipe) -> bool:
    arguments = recipe.make(torch.bfloat16).arguments
    return any(arguments.get(name) is not None for name in LENGTHS)


# One sample of each layout.
SAMPLES = list(
    {
        (operator.name, recipe.layout): recipe
        for operator in OPERATORS.values()
        if not operator.in_place
        for recipe in operator.recipes
        if has_lengths(recipe)
    }.values()
)


def as_list(lengths: Any) -> Any:
    return lengths.tolist() if isinstance(lengths, Tensor) else lengths


def as_tensor(lengths: Any) -> Any:
    return torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths


def as_tuple_of_numbers(lengths: Any) -> Any:
    return lengths if lengths is None else tuple(as_list(lengths))


def converted(sample: Sample, convert: Callable[[Any], Any]) -> Sample:
    given = {name: sample.arguments[name] for name in LENGTHS if name in sample.arguments}
    return sample.given(**{name: convert(lengths) for name, lengths in given.items()})


def test_every_operator_with_lengths_is_here() -> None:
    with_lengths = {
        name
        for name in OPERATORS
        if any(x.name == LENGTHS[0] for x in OPERATORS[name].overload._schema.arguments)
    }
    assert {recipe.operator.name for recipe in SAMPLES} == with_lengths


@pytest.mark.parametrize("recipe", SAMPLES, ids=lambda recipe: recipe.id)
@pytest.mark.parametrize("convert", [as_list, as_tensor, as_tuple_of_numbers])
def test_lists_and_tensors(recipe: Recipe, convert: Callable[[Any], Any]) -> None:
    sample = recipe.make(torch.bfloat16)
    assert_same_bits(converted(sample, convert).call(ops), sample.call(torch.ops.ascend))


@pytest.mark.parametrize("operator", SPARSE_OPERATORS, ids=lambda x: x.name)
@pytest.mark.parametrize("left_out", LENGTHS)
def test_lengths_of_one_side(operator: Operator, left_out: str) -> None:
    sample = operator.make(ALL_TOKENS[left_out], torch.bfloat16)
    one_side = sample.replace(**{left_out: None})
    assert_same_bits(one_side.call(torch.ops.ascend), sample.call(torch.ops.ascend))


@pytest.mark.parametrize(
    "recipe", [r for r in SAMPLES if "lightning" in r.operator.name or "sparse" in r.operator.name],
    ids=lambda recipe: recipe.id,
)  # fmt: skip
def test_lists_are_compiled(recipe: Recipe) -> None:
    sample = converted(recipe.make(torch.bfloat16), as_list)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda: as_tuple(sample.call(ops)), backend="aot_eager", fullgraph=True
    )
    assert_same_bits(compiled(), sample.call(ops))
