"""The indexers and sparse_flash_attention over keys in the blocks of a cache."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.record import Recipe
from support.samples import OPERATORS, Sample, bytes_of
from support.turns import by_turns
from torch import Tensor

np = pytest.importorskip("numpy", reason="numpy is not installed")

INDEXER, ATTENTION = OPERATORS["lightning_indexer"], OPERATORS["sparse_flash_attention"]
OF_INT8 = OPERATORS["quant_lightning_indexer"]
PAGED = [x for y in (INDEXER, OF_INT8, ATTENTION) for x in y.recipes if x.case.page]
# The others name keys that a dense call in BSND has no room for.
WITH_DENSE_CALL = [
    x for x in PAGED if x.layout == "TND" or getattr(x.case, "pattern", "") != "future"
]

pytestmark = pytest.mark.usefixtures("no_limits")


def dense(recipe: Recipe, sample: Sample) -> Sample:
    """The same call with keys side by side."""
    table, lengths = (sample.arguments[x] for x in ("block_table", "actual_seq_lengths_key"))
    layout = "layout_kv" if "layout_kv" in sample.arguments else "layout_key"
    changes: dict[str, Any] = {layout: None, "block_table": None}
    for name in ("key", "value", "key_rope", "key_dequant_scale"):
        cache = sample.arguments.get(name)
        if cache is None:
            continue
        rows = ops.gather_paged_kv(cache, table, lengths)
        if recipe.layout == "BSND":
            keys = cache.new_zeros(len(lengths), max(lengths.tolist(), default=1), *rows.shape[1:])
            for to, of_sequence in zip(keys, rows.split(lengths.tolist()), strict=True):
                to[: len(of_sequence)] = of_sequence
            rows = keys
        changes[name] = rows
    if "value" in changes and sample.arguments["value"] is sample.arguments["key"]:
        changes["value"] = changes["key"]
    if recipe.layout == "TND":
        changes["actual_seq_lengths_key"] = lengths.cumsum(0, dtype=torch.int32)
    return sample.replace(**changes)


@by_turns(2)
@pytest.mark.parametrize("recipe", WITH_DENSE_CALL, ids=lambda x: x.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equals_dense_keys(recipe: Recipe, dtype: torch.dtype) -> None:
    """Bit by bit: only where the rows are read from differs."""
    paged = recipe.make(dtype)
    side_by_side = dense(recipe, paged)
    assert all(map(torch.equal, paged.call(torch.ops.ascend), side_by_side.call(torch.ops.ascend)))


@pytest.mark.parametrize("recipe", PAGED[:1] + PAGED[-1:], ids=lambda x: x.id)
def test_blocks_apart(recipe: Recipe) -> None:
    """Caches that are slices of one buffer, whose other half is NaN."""
    sample = recipe.make(torch.bfloat16)

    def apart(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[1] == recipe.case.page and x.is_floating_point():
            return torch.stack((x, torch.full_like(x, torch.nan)), 1)[:, 0]
        return x

    sliced = sample.map(apart)
    assert not sliced.inputs["key"].is_contiguous()
    assert all(map(torch.equal, sliced.call(torch.ops.ascend), sample.call(torch.ops.ascend)))


def test_only_selected_blocks_are_read() -> None:
    """An evicted block is an error only where a query selects a key of it."""
    cache = torch.randn(3, 16, 1, 32)
    query = torch.randn(1, 1, 4, 32)
    table = torch.tensor([[-1, 2, 0]], dtype=torch.int32)
    lengths = torch.tensor([40], dtype=torch.int32)
    options: dict[str, Any] = {
        "scale_value": 0.1, "actual_seq_lengths_key": lengths, "layout_kv": "PA_BSND",
        "block_table": table,
    }  # fmt: skip
    kept = torch.tensor([17, 39, 16], dtype=torch.int32).view(1, 1, 1, 3)
    out, *statistics = ops.sparse_flash_attention(query, cache, cache, kept, **options)
    rows = torch.cat((cache[2, :2], cache[0, 7:8]))[:, 0]
    weights = (query[0, 0] @ rows.T * 0.1).softmax(-1)
    torch.testing.assert_close(out[0, 0], weights @ rows)
    assert [x.shape for x in statistics] == [(0,), (0,)]
    evicted = torch.tensor([17, 15, 16], dtype=torch.int32).view(1, 1, 1, 3)
    with pytest.raises(
        ValueError, match=r"block_table: expected blocks in \[0, 3\), got -1 at \(0, 0\)"
    ):
        ops.sparse_flash_attention(query, cache, cache, evicted, **options)
    weights_index = torch.rand(1, 1, 4)
    with pytest.raises(ValueError, match=r"block_table: expected blocks in \[0, 3\), got -1"):
        ops.lightning_indexer(
            query, cache, weights_index, sparse_count=4, actual_seq_lengths_key=lengths,
            layout_key="PA_BSND", block_table=table,
        )  # fmt: skip


def test_statistics_on_request() -> None:
    """torch.ops returns them by default, the public function does not."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(3, 16, 1, 32, generator=generator)
    query = torch.randn(2, 4, 32, generator=generator)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    indices = torch.tensor([[[17, 3, -1]], [[-1, -1, -1]]], dtype=torch.int32)
    options: dict[str, Any] = {
        "scale_value": 0.5, "layout": "TND", "layout_kv": "PA_BSND", "block_table": table,
        "actual_seq_lengths_query": torch.tensor([2], dtype=torch.int32),
        "actual_seq_lengths_key": torch.tensor([20], dtype=torch.int32),
    }  # fmt: skip
    given = (query, cache, cache, indices)
    _, maximum, total = torch.ops.ascend.sparse_flash_attention(*given, **options)
    scores = 0.5 * query[0].double() @ torch.stack((cache[0, 1, 0], cache[2, 3, 0])).double().T
    lse = scores.logsumexp(-1)
    torch.testing.assert_close((maximum + total.log())[0, 0].double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(maximum[0, 0].double(), scores.amax(-1), rtol=1e-5, atol=1e-5)
    assert maximum.shape == total.shape == (1, 2, 4)
    assert not maximum[0, 1].any()
    assert not total[0, 1].any()
    _, *none = ops.sparse_flash_attention(*given, **options)
    assert [x.shape for x in none] == [(0,), (0,)]
    _, *statistics = ops.sparse_flash_attention(*given, **options, return_softmax_lse=True)
    assert all(map(torch.equal, statistics, (maximum, total)))


def test_statistics_are_optional() -> None:
    sample = ATTENTION.small_sample()
    public = {**sample.inputs, **sample.options}
    out, *statistics = ops.sparse_flash_attention(**public)
    assert all(x.numel() for x in statistics)
    without, *none = ops.sparse_flash_attention(**public, return_softmax_lse=False)
    assert torch.equal(out, without)
    assert [x.shape for x in none] == [(0,), (0,)]
    wanted = sample.requires_grad(["query"])
    with pytest.raises(NotImplementedError, match="return_softmax_lse: expected True where a grad"):
        ops.sparse_flash_attention(**wanted.inputs, **wanted.options, return_softmax_lse=False)


def test_no_gradient() -> None:
    sample = PAGED[-1].make(torch.float32).requires_grad(["query"])
    with pytest.raises(NotImplementedError, match="layout_kv: expected keys without a block table"):
        sample.call(torch.ops.ascend)
    with torch.no_grad():
        sample.call(torch.ops.ascend)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_gathered_rows_are_those_that_were_written(shape: tuple[int, ...]) -> None:
    lengths = [5, 0, 9]
    table = torch.tensor([[4, 1, -7], [0, 0, 0], [2, 5, 3]], dtype=torch.int32)
    cache = torch.full((6, 4, *shape), torch.nan)
    rows = torch.randn(sum(lengths), *shape)
    positions = [torch.arange(length) for length in lengths]
    slots = torch.cat([ops.slot_mapping(t, p, 4) for t, p in zip(table, positions, strict=True)])
    cache.flatten(0, 1)[slots.long()] = rows
    assert bytes_of(ops.gather_paged_kv(cache, table, lengths)).equal(bytes_of(rows))
    assert ops.gather_paged_kv(cache, table[:0], []).shape == (0, *shape)
    assert ops.gather_paged_kv(cache, table.long(), torch.tensor(lengths)).equal(rows)
    assert ops.gather_paged_kv(cache, table, np.array(lengths)).equal(rows)


def test_a_table_without_memory() -> None:
    """torch's indexing crashes with it."""
    cache = torch.randn(3, 4, 2)
    zeros = torch._efficientzerotensor(2, 1, dtype=torch.int64)
    expected = torch.cat([cache[0], cache[0, :2]])
    assert ops.gather_paged_kv(cache, zeros, [4, 2]).equal(expected)
