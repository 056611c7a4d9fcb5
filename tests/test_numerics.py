"""Every operator gives what its reference gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ascend_attn_ops import reference
from samples import OPERATORS, RECIPES, Recipe, Sample
from tolerance import TOLERANCES, Tolerance, assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

FIRST = [next(r for r in RECIPES if r.operator == operator) for operator in OPERATORS]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
def test_matches_the_reference(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    actual = sample.call(torch.ops.ascend)
    if sample.operator == "lightning_indexer":
        assert_same_selection(sample, *actual)
        return
    names = output_names(sample.operator)
    expected = sample.double().call(reference)
    for name, x, y in zip(names, actual, expected, strict=True):
        # The dtype that was asked for is not always that of what came out.
        prompt = sample.operator == "prompt_flash_attention"
        tolerance = tolerance_of(sample.operator, name, x.dtype if prompt else dtype)
        assert_close(name, x, y, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", FIRST, ids=lambda recipe: recipe.operator)
def test_dtypes_of_the_outputs(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    actual, expected = sample.call(torch.ops.ascend), sample.call(reference)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]


def output_names(operator: str) -> list[str]:
    schema = getattr(torch.ops.ascend, operator).default._schema
    return [returned.name for returned in schema.returns]


# spec/flash_attention.md, section 9: relative to the largest element of the tensor. Rounding to
# bfloat16 alone may cost 3.9e-3 of it.
FLASH_ATTENTION = {
    torch.float16: (1e-3, 5e-3),
    torch.bfloat16: (4e-3, 2.5e-2),
    torch.float32: (1e-5, 1e-4),
    torch.float64: (1e-10, 1e-10),
}


def tolerance_of(operator: str, output: str, dtype: torch.dtype) -> Tolerance:
    if operator.startswith("flash_attention_score"):
        if output.startswith("softmax"):
            # Not of the largest: rows without keys have +-FLT_MAX.
            exact = dtype == torch.float64
            return Tolerance(rtol=1e-10, atol=1e-10) if exact else Tolerance(rtol=1e-5, atol=1e-5)
        forward, gradient = FLASH_ATTENTION[dtype]
        tolerance = gradient if output.startswith("d") else forward
        return Tolerance(rtol=0, of_largest=tolerance, unit_scale=False)
    if (operator, output) == ("sparse_lightning_indexer_grad_kl_loss", "d_weights"):
        # Sums whose terms cancel. What rounding to the output's dtype costs comes on top.
        rounding = torch.finfo(dtype).eps / 2
        if dtype.itemsize == 2:
            return Tolerance(rtol=rounding, of_largest=1e-3)
    return TOLERANCES[dtype]


def all_scores(sample: Sample) -> Tensor:
    """(..., 1, keys): the fp64 score of every key, -inf where the query may not see it."""
    exact = sample.double()
    keys = sample.inputs["key"].shape[-3]
    indices, values = exact.replace(sparse_count=keys, return_values=True).call(reference)
    # One column more takes the padding.
    scores = values.new_full((*values.shape[:-1], keys + 1), -torch.inf)
    columns = torch.where(indices < 0, keys, indices).long()
    return scores.scatter(-1, columns, values)[..., :keys]


def assert_same_selection(sample: Sample, indices: Tensor, values: Tensor) -> None:
    """Sets of keys are compared, since rounding may exchange keys of nearly the same score."""
    scores = all_scores(sample)
    k, keys = indices.shape[-1], scores.shape[-1]
    counts = scores.isfinite().sum(-1, keepdim=True).clamp(max=k)
    slots = torch.arange(k).expand(indices.shape)
    assert torch.equal(indices >= 0, slots < counts), "the padding is not where it belongs"
    assert (values[indices < 0] == -torch.inf).all()

    columns = torch.where(indices < 0, keys, indices).long()
    times = torch.zeros(*scores.shape[:-1], keys + 1).scatter_add(
        -1, columns, torch.ones(columns.shape)
    )[..., :keys]
    assert times.amax() <= 1 if times.numel() else True, "a key is selected twice"
    chosen = times > 0
    assert scores[chosen].isfinite().all(), "a key is selected that the query may not see"

    # The scores are accumulated in fp32 for the half-precision dtypes too.
    exact = sample.inputs["query"].dtype == torch.float64
    tolerance = TOLERANCES[torch.float64 if exact else torch.float32].allowed(scores)
    lowest = torch.where(chosen, scores, torch.inf)
    highest = torch.where(chosen, -torch.inf, scores)
    if keys > 0:
        slack = tolerance.nan_to_num(0, 0).amax(-1)
        assert (highest.amax(-1) <= lowest.amin(-1) + 2 * slack).all(), "a higher score is left out"

    padded = torch.cat((scores, scores.new_full((*scores.shape[:-1], 1), -torch.inf)), -1)
    assert_close("values", values, padded.gather(-1, columns), TOLERANCES[values.dtype])
    assert not (values[..., 1:] > values[..., :-1]).any(), "the values are not descending"


def tied_sample(recipe: Recipe, dtype: torch.dtype) -> Sample:
    """Small integers, exact in every dtype, so that many scores are equal."""
    return recipe.make(dtype).map(
        lambda x: x.sign() * (x.abs() > 1.5) if x.is_floating_point() else x
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if recipe.operator == "lightning_indexer"],
    ids=lambda recipe: recipe.id,
)
def test_equal_scores_go_to_the_lower_index(recipe: Recipe, dtype: torch.dtype) -> None:
    recipe = replace(recipe, case=replace(recipe.case, d=min(recipe.case.d, 16)))
    sample = tied_sample(recipe, dtype)
    for x, y in zip(sample.call(torch.ops.ascend), sample.call(reference), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_empty_unless_asked_for(dtype: torch.dtype) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.operator == "lightning_indexer")
    sample = recipe.make(dtype).replace(return_values=False)
    indices, values = sample.call(torch.ops.ascend)
    assert (values.shape, values.dtype) == ((0,), dtype)
    assert torch.equal(indices, sample.replace(return_values=True).call(torch.ops.ascend)[0])


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
