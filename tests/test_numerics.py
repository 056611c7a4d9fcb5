"""Every operator gives what its reference gives."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops import reference
from samples import OPERATORS, RECIPES, Operator, Recipe
from tolerance import TOLERANCES, assert_close

pytestmark = pytest.mark.usefixtures("no_limits")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
def test_matches_the_reference(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    recipe.operator.assert_matches_reference(sample, sample.call(torch.ops.ascend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if not x.in_place], ids=lambda x: x.name
)
def test_dtypes_of_the_outputs(operator: Operator, dtype: torch.dtype) -> None:
    sample = operator.make(operator.cases[0], dtype)
    actual, expected = sample.call(torch.ops.ascend), sample.call(reference)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_share_outside_has_no_room_for_what_is_not_finite(
    dtype: torch.dtype, bad: float
) -> None:
    expected = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    actual = expected.to(dtype)
    actual[7] = 0
    assert_close("within the share", actual, expected, TOLERANCES[dtype])
    actual[7] = bad
    with pytest.raises(AssertionError, match=r"1 of 1000 elements outside"):
        assert_close("not finite", actual, expected, TOLERANCES[dtype])
