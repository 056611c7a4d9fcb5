"""Sequence lengths as a list or as a tensor, in every public function that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.check.samples.sparse import ALL_TOKENS, LENGTHS
from support.samples import OPERATORS, SPARSE_OPERATORS, Operator, Recipe, Sample, as_tuple
from support.tolerance import assert_same_bits
from torch import Tensor

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.usefixtures("no_limits")


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

each_sample = pytest.mark.parametrize("recipe", SAMPLES, ids=lambda recipe: recipe.id)


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


@each_sample
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
    "recipe",
    [r for r in SAMPLES if "lightning" in r.operator.name or "sparse" in r.operator.name],
    ids=lambda recipe: recipe.id,
)
def test_lists_are_compiled(recipe: Recipe) -> None:
    sample = converted(recipe.make(torch.bfloat16), as_list)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda: as_tuple(sample.call(ops)), backend="aot_eager", fullgraph=True
    )
    assert_same_bits(compiled(), sample.call(ops))
