"""The checked mode on the CPU, where it finds what a device could not do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops._value_checks import VARIABLE
from ascend_attn_ops.check.samples.sparse import SparseCase
from support import fresh
from support.samples import OPERATORS, RECIPES, Recipe
from support.tolerance import assert_same_bits

# Rows of sparse_indices in samples have gaps that a device would read.
FIRST = {x.operator.name: x for x in reversed(RECIPES)}
WITHOUT_INDICES = [
    x for x in FIRST.values() if "sparse_indices" not in x.make(torch.float32).tensors
]


@pytest.mark.parametrize("recipe", WITHOUT_INDICES, ids=lambda recipe: recipe.operator.name)
def test_right_calls(recipe: Recipe) -> None:
    sample = recipe.make(torch.float32)
    with ops.limits(None):
        expected = sample.call(torch.ops.ascend)
        with ops.check_values():
            assert_same_bits(sample.call(torch.ops.ascend), expected)


def sparse_call(operator: str, indices: list[int], dtype: torch.dtype) -> Callable[[], object]:
    """One query that sees four keys, and selects these."""
    case = SparseCase(b=1, s=(1, 4), rope=8, heads=8, index_heads=8, k=len(indices), absorbed=True)
    sample = OPERATORS[operator].make(case, torch.float32)
    chosen = torch.tensor(indices, dtype=dtype).view(1, 1, 1, -1)
    return lambda: sample.replace(sparse_indices=chosen).call(torch.ops.ascend)


def written_twice() -> None:
    keys, cache = torch.randn(2, 1, 64), torch.zeros(2, 16, 1, 64)
    ops.scatter_pa_kv_cache_(keys, cache, torch.tensor([5, 5]), keys, cache.clone())


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("operator", "indices", "message"),
    [
        ("sparse_flash_attention", [0, -1, 2], "expected nothing behind the first -1 of a row"),
        ("sparse_flash_attention_grad", [0, 1, -1], "expected no -1 in the first 3 slots"),
        ("lightning_indexer_grad", [0, -1, 2], "expected no -1 in the first 3 slots"),
        ("sparse_lightning_indexer_grad_kl_loss", [0, 1, -1], "expected no -1 in the first 3"),
    ],
)
def test_slots_that_a_device_reads(
    operator: str, indices: list[int], message: str, dtype: torch.dtype
) -> None:
    call = sparse_call(operator, indices, dtype)
    call()
    with ops.check_values(), pytest.raises(ValueError, match=message):
        call()


def test_the_gradient_of_a_recorded_call() -> None:
    query, key = torch.randn(1, 2, 8, 16, requires_grad=True), torch.randn(1, 2, 1, 16)
    indices = torch.tensor([0, -1], dtype=torch.int32).expand(1, 2, 1, 2)
    with ops.limits(None):
        out, *_ = ops.sparse_flash_attention(query, key, key, indices, scale_value=0.1)
    with ops.check_values(), pytest.raises(ValueError, match=r"got -1 at \(0, 1, 0, 1\)"):
        out.sum().backward()


@pytest.mark.usefixtures("no_limits")
def test_a_slot_that_is_written_twice() -> None:
    written_twice()
    with ops.check_values(), pytest.raises(ValueError, match="got 5 written by entries 0 and 1"):
        written_twice()


@pytest.mark.usefixtures("no_limits")
def test_counts_of_paged_keys_that_are_cumulative() -> None:
    query, pages = torch.randn(3, 1, 2, 16), torch.randn(9, 16, 32)
    table = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 0, 0]], dtype=torch.int32)

    def attend(counts: list[int]) -> None:
        options = {"block_table": table, "actual_seq_lengths_key": counts, "layout": "BSND"}
        ops.fused_infer_attention_score(query, pages, pages, **options)

    with ops.check_values():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend([17, 18, 32])  # which happen to increase
        with pytest.warns(
            UserWarning, match=r"\[20, 30, 62\] look cumulative, and sequence 2 reads"
        ):
            attend([20, 30, 62])


@pytest.mark.parametrize("text", ["2", "yes"])
def test_a_wrong_environment_says_so(text: str) -> None:
    result = fresh.run("import ascend_attn_ops", **{VARIABLE: text})
    assert result.status != 0
    last = result.err.strip().splitlines()[-1]
    assert last == f"ValueError: {VARIABLE}={text}: expected 0 or 1"
