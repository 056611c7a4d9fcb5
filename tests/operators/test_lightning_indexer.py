"""Promises of lightning_indexer beyond the set of keys that it selects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ascend_attn_ops import reference
from ascend_attn_ops.check.samples.lightning_indexer import LIGHTNING_INDEXER
from support.samples import Recipe, Sample
from support.turns import by_turns

pytestmark = pytest.mark.usefixtures("no_limits")

NAN = float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def select(scores: list[float], count: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """The keys selected by a query whose score of key s is scores[s]."""
    # relu(1 * 1) and relu(1 * score) alone give no negative scores: the weight carries the sign.
    key = torch.tensor(scores, dtype=dtype)
    heads = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    weights = torch.tensor([[[1.0, -1.0]]], dtype=dtype)
    indices, _ = torch.ops.ascend.lightning_indexer(
        heads.view(1, 1, 2, 1), key.view(1, -1, 1, 1), weights, sparse_count=count, sparse_mode=0
    )
    return indices.flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scores_descend(dtype: torch.dtype) -> None:
    assert select([0.5, -3, 2, 1, -0.25], 5, dtype) == [2, 3, 0, 4, 1]
    assert select([0.5, -3, 2, 1, -0.25], 3, dtype) == [2, 3, 0]
    assert select([0.5, -3, 2], 5, dtype) == [2, 0, 1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 100, 299, 300])
def test_equal_scores_keep_the_lower_index_first(dtype: torch.dtype, count: int) -> None:
    assert select([1.0] * 300, count, dtype) == list(range(count))
    # Minus zero is zero.
    assert select([0.0, -0.0] * 150, count, dtype) == list(range(count))


def test_many_ties_against_a_stable_sort() -> None:
    scores = torch.randint(-4, 5, (1000,), generator=torch.Generator().manual_seed(0)).float()
    expected = scores.sort(descending=True, stable=True).indices[:700].tolist()
    assert select(scores.tolist(), 700) == expected


@pytest.mark.parametrize("count", [1, 2, 4])
def test_nan_comes_first(count: int) -> None:
    """As in torch.topk: a NaN in the model shows in the selection."""
    assert select([1.0, NAN, 3.0, -2.0], count) == [1, 2, 0, 3][:count]


def tied_sample(recipe: Recipe, dtype: torch.dtype) -> Sample:
    """Small integers, exact in every dtype, so that many scores are equal."""
    return recipe.make(dtype).map(
        lambda x: x.sign() * (x.abs() > 1.5) if x.is_floating_point() else x
    )


@by_turns(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", LIGHTNING_INDEXER.recipes, ids=lambda recipe: recipe.id)
def test_equal_scores_go_to_the_lower_index(recipe: Recipe, dtype: torch.dtype) -> None:
    recipe = replace(recipe, case=replace(recipe.case, d=min(recipe.case.d, 16)))
    sample = tied_sample(recipe, dtype)
    for x, y in zip(sample.call(torch.ops.ascend), sample.call(reference), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_derivative_of_relu_at_0_is_0(dtype: torch.dtype) -> None:
    query, key = torch.eye(2, dtype=dtype).view(2, 1, 1, 1, 2)
    one = torch.ones(1, 1, 1, dtype=dtype)
    for x in torch.ops.ascend.lightning_indexer_grad(
        query, key, one[None], torch.zeros(1, 1, 1, 1, dtype=torch.int32), one, sparse_mode=0
    ):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_empty_unless_asked_for(dtype: torch.dtype) -> None:
    sample = LIGHTNING_INDEXER.recipes[0].make(dtype).replace(return_values=False)
    indices, values = sample.call(torch.ops.ascend)
    assert (values.shape, values.dtype) == ((0,), dtype)
    assert torch.equal(indices, sample.replace(return_values=True).call(torch.ops.ascend)[0])
