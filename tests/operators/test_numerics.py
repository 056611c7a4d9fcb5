"""Every operator gives what its reference gives."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops import reference
from support.samples import OPERATORS, RECIPES, Operator, Recipe, Sample
from support.turns import by_turns

pytestmark = pytest.mark.usefixtures("no_limits")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@by_turns(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
def test_matches_the_reference(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    recipe.operator.bounds.check(sample, sample.call(torch.ops.ascend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if not x.in_place], ids=lambda x: x.name
)
def test_dtypes_of_the_outputs(operator: Operator, dtype: torch.dtype) -> None:
    sample = operator.make(operator.cases[0], dtype)
    actual, expected = sample.call(torch.ops.ascend), sample.call(reference)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 4.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if not x.in_place], ids=lambda x: x.name
)
def test_no_element_is_let_off(operator: Operator, dtype: torch.dtype, bad: float) -> None:
    """Neither one that is not finite, nor one that is 4 off: of the sums of these samples, half
    types round less."""
    sample = operator.make(operator.cases[0], dtype)
    outputs = sample.call(torch.ops.ascend)
    for number, x in enumerate(outputs):
        if not x.is_floating_point():
            continue
        changed = x.clone().view(-1)
        at = int(x.isfinite().flatten().long().argmax())
        changed[at] = changed[at] + bad
        wrong = list(outputs)
        wrong[number] = changed.view(x.shape)
        if x.numel():
            with pytest.raises(AssertionError, match=r"outside|descending|softmax|left out"):
                operator.bounds.check(sample, tuple(wrong))


@pytest.mark.parametrize(("product", "either"), [(1e-6, True), (1e-3, False), (-1e-3, False)])
def test_a_sign_that_rounding_decides_may_be_either(product: float, either: bool) -> None:
    """The gradient depends on that sign, and either result is accepted."""
    inputs = {
        "query": torch.ones(1, 1, 1, 2), "key": torch.tensor([1, -1 + product]).view(1, 1, 1, 2),
        "d_values": torch.ones(1, 1, 1, 1),
        "sparse_indices": torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        "weights": torch.ones(1, 1, 1),
    }  # fmt: skip
    sample = Sample("lightning_indexer_grad", "", inputs, {})
    expected = OPERATORS[sample.operator].bounds.expected
    assert expected is not None
    d_query, d_key, _ = expected(sample)
    for one, x in ((d_query, inputs["key"]), (d_key, inputs["query"])):
        right, wrong = (x, 0 * x) if product > 0 else (0 * x, x)
        one.check(right)
        if either:
            one.check(wrong)
        else:
            with pytest.raises(AssertionError, match=r"2 of 2 elements outside"):
                one.check(wrong)
