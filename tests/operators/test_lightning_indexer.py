"""Promises of lightning_indexer beyond the set of keys that it selects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.lightning_indexer import CASES, LIGHTNING_INDEXER
from ascend_attn_ops import reference
from support.samples import OPERATORS, Recipe, Sample
from support.tolerance import assert_same_bits
from support.turns import by_turns
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

NAN = float("nan")
RECIPES = [*LIGHTNING_INDEXER.recipes, *OPERATORS["quant_lightning_indexer"].recipes]
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
    """Small integers, exact in every dtype, so that many scores are equal, or scores of int8."""
    return recipe.make(dtype).map(
        lambda x: x.sign() * (x.abs() > 1.5) if x.is_floating_point() else x
    )


@by_turns(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
def test_equal_scores_go_to_the_lower_index(recipe: Recipe, dtype: torch.dtype) -> None:
    recipe = replace(recipe, case=replace(recipe.case, d=min(recipe.case.d, 16)))
    sample = tied_sample(recipe, dtype)
    assert all(map(torch.equal, sample.call(torch.ops.ascend), sample.call(reference)))


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


# Keys that each stand for several tokens, also in the gradients of the loss.


def indexer(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """In sizes of devices; weights are in float32 beside half types."""
    random = torch.Generator().manual_seed(queries)
    query = torch.randn(1, queries, 8, 128, generator=random, dtype=torch.float64)
    key = torch.randn(1, keys, 1, 128, generator=random, dtype=torch.float64)
    weights = torch.randn(1, queries, 8, generator=random, dtype=torch.float64)
    of_weights = torch.float64 if dtype == torch.float64 else torch.float32
    return query.to(dtype), key.to(dtype), weights.to(of_weights)


def seen(indices: Tensor) -> list[int]:
    """How many keys each query of the only batch sees."""
    return (indices >= 0).sum(-1).flatten().tolist()


def selected(
    queries: int, keys: int, ratio: int, residual: int | None = None, **options: Any
) -> Any:
    given = None if residual is None else torch.tensor([residual], dtype=torch.int32)
    return ops.lightning_indexer(
        *indexer(queries, keys), sparse_count=64, cmp_ratio=ratio, cmp_residual_key=given, **options
    )


def test_a_key_is_seen_with_the_last_of_its_tokens() -> None:
    indices, _ = selected(6, 1, 4)
    assert seen(indices) == [0, 0, 0, 1, 1, 1]
    indices, _ = selected(9, 4, 2)
    assert seen(indices) == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    # Three queries behind 8 tokens that have been compressed: tokens 8, 9 and 10 of 11.
    indices, _ = selected(3, 2, 4, residual=3)
    assert seen(indices) == [2, 2, 2]
    indices, _ = selected(4, 2, 4, residual=0)  # tokens 4 to 7 of 8
    assert seen(indices) == [1, 1, 1, 2]
    indices, _ = selected(4, 2, 4, sparse_mode=0)
    assert seen(indices) == [2, 2, 2, 2]


@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (4, 1), (61, 15)])
def test_none_is_the_residual_of_the_queries(queries: int, keys: int) -> None:
    expected = selected(queries, keys, 4, residual=queries - 4 * keys, return_values=True)
    assert_same_bits(selected(queries, keys, 4, return_values=True), expected)


def test_a_ratio_of_one_is_the_function_without_it() -> None:
    for case in CASES[:8]:
        sample = LIGHTNING_INDEXER.make(case, torch.bfloat16)
        assert_same_bits(sample.given(cmp_ratio=1).call(ops), sample.call(ops))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_not_rounded_to_the_dtype_of_query(dtype: torch.dtype) -> None:
    query, key, weights = indexer(9, 2, dtype)
    _, values = ops.lightning_indexer(
        query, key, weights, sparse_count=2, cmp_ratio=4, return_values=True
    )
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    products = torch.einsum("bihd,bjd->bihj", query.double(), key[:, :, 0].double())
    scores = torch.einsum("bih,bihj->bij", weights.double(), products.relu())
    best = values[0, -1, 0]
    torch.testing.assert_close(
        best.double(), scores[0, -1].sort(descending=True).values, rtol=1e-5, atol=1e-5
    )


def test_values_have_no_gradient() -> None:
    query, key, weights = indexer(9, 2)
    leaves = query.requires_grad_(), key, weights
    with pytest.raises(
        NotImplementedError, match=r"lightning_indexer: cmp_ratio: expected 1 where"
    ):
        ops.lightning_indexer(*leaves, sparse_count=2, cmp_ratio=4, return_values=True)
    indices, _ = ops.lightning_indexer(*leaves, sparse_count=2, cmp_ratio=4)
    assert not indices.requires_grad
    with torch.no_grad():
        ops.lightning_indexer(*leaves, sparse_count=2, cmp_ratio=4, return_values=True)


def test_a_device_accepts_a_sequence_without_a_complete_key() -> None:
    call = indexer(3, 0, torch.bfloat16)
    with ops.limits("A2", "9.1"):
        indices, _ = ops.lightning_indexer(*call, sparse_count=512, cmp_ratio=4)
        results = ops.sparse_lightning_indexer_kl_loss_grad(
            *call, indices, torch.zeros(indices.shape), cmp_ratio=4
        )
    assert seen(indices) == [0, 0, 0]
    assert not any(x.any() for x in results)


@pytest.mark.parametrize("cann", ["8.5", "9.0"])
def test_cann_has_compressed_keys_from_9_1_on(cann: str) -> None:
    call = indexer(9, 2, torch.bfloat16)
    with ops.limits("A2", cann), pytest.raises(ValueError, match=r"cmp_ratio .* to be 1 "):
        ops.lightning_indexer(*call, sparse_count=512, cmp_ratio=4)
    indices, target = torch.zeros(1, 9, 1, 512, dtype=torch.int32), torch.zeros(1, 9, 1, 512)
    with ops.limits("A2", cann), pytest.raises(NotImplementedError):
        ops.sparse_lightning_indexer_kl_loss_grad(*call, indices, target, cmp_ratio=4)


def test_determinism_is_refused_where_cann_documents_none(set_determinism: Any) -> None:
    call = indexer(9, 2, torch.bfloat16)
    indices, target = torch.zeros(1, 9, 1, 512, dtype=torch.int32), torch.zeros(1, 9, 1, 512)

    def gradients() -> Any:
        return ops.sparse_lightning_indexer_kl_loss_grad(*call, indices, target, cmp_ratio=4)

    set_determinism(True)
    gradients()
    with ops.limits("A2"), pytest.raises(ValueError, match="deterministic: expected False"):
        gradients()
    set_determinism(True, warn_only=True)
    with ops.limits("A2"):
        gradients()
