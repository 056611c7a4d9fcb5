"""Properties of every call: strides and repetition change nothing; inputs are left alone.

tests/fuzz tries the same with random calls.
"""

from __future__ import annotations

import pytest
import torch
from support.samples import OPERATORS, RECIPES, Recipe, Sample, bytes_of
from support.tolerance import assert_same_bits
from support.turns import by_turns

DTYPES = [torch.bfloat16, torch.float32]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)


@by_turns(8)
@each_dtype
@each_recipe
@pytest.mark.usefixtures("no_limits")
def test_strides_change_nothing(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    expected = sample.call(torch.ops.ascend)
    for variant in (sample.strided(), sample.transposed()):
        outputs = variant.call(torch.ops.ascend)
        assert_same_bits(outputs, expected)
        assert all(x.is_contiguous() for x in outputs)


@by_turns(8)
@each_dtype
@each_recipe
@pytest.mark.usefixtures("no_limits")
def test_two_runs_are_bitwise_equal(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    # As bytes: rows of a cache that nobody reads are NaN.
    before = tuple(bytes_of(x) for x in sample.clone().tensors.values())
    assert_same_bits(sample.call(torch.ops.ascend), sample.call(torch.ops.ascend))
    assert_same_bits(tuple(map(bytes_of, sample.tensors.values())), before)


@by_turns(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES if r.on_device], ids=lambda recipe: recipe.id
)
def test_device_shapes_are_within_the_limits(recipe: Recipe, dtype: torch.dtype) -> None:
    """Without lifting them: these samples must run on the device in force by default."""
    recipe.make(dtype).call(torch.ops.ascend)


@pytest.mark.usefixtures("no_limits")
def test_value_may_be_key_in_another_order() -> None:
    """In the memory of key, from the same address and with the same sizes."""
    query, key = torch.randn(2, 1, 6, 1, 6)
    value = key.transpose(1, 3)
    indices = torch.arange(6, dtype=torch.int32).expand(1, 6, 1, 6).contiguous()
    expected = torch.ops.ascend.sparse_flash_attention(
        query, key, value.clone(memory_format=torch.contiguous_format), indices, scale_value=1.0
    )
    actual = torch.ops.ascend.sparse_flash_attention(query, key, value, indices, scale_value=1.0)
    assert all(map(torch.equal, actual, expected))


# The samples' own machinery, with a call whose arguments are lists of tensors.

OPERATOR = OPERATORS["attention_update"]
NAMES = [f"{name}[{i}]" for name in ("lse", "local_out") for i in range(3)]


@pytest.fixture
def sample() -> Sample:
    return OPERATOR.make(OPERATOR.cases[0], torch.float32)


def test_tensors_of_a_list_have_names(sample: Sample) -> None:
    assert list(sample.tensors) == NAMES
    assert sample.tensors["local_out[1]"] is sample.inputs["local_out"][1]
    assert sample.tensor_names(["lse[2]", "local_out", "bias"]) == ("lse[2]", *NAMES[3:])
    zero = torch.zeros(2, 5)
    changed = sample.replace(**{"lse[1]": zero})
    assert changed.tensors["lse[1]"] is zero
    assert sample.tensors["lse[1]"] is not zero
    with pytest.raises(AssertionError, match="no scale"):
        sample.replace(scale=1.0)


def test_map_keeps_a_tensor_that_is_passed_twice(sample: Sample) -> None:
    x = sample.tensors["local_out[0]"]
    twice = sample.replace(local_out=[x, x, torch.ones_like(x)]).clone()
    first, second, other = twice.inputs["local_out"]
    assert first is second
    assert first is not x
    assert other is not first


def test_variants_in_memory_are_not_contiguous(sample: Sample) -> None:
    for variant in (sample.strided(), sample.transposed()):
        assert not all(x.is_contiguous() for x in variant.tensors.values())
