"""fused_infer_attention_score beyond dense attention: pages, dead rows, merging, limits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.fused_infer_attention_score import (
    DEVICE_CASES,
    INT8_CASES,
    InferCase,
    build,
)
from ascend_attn_ops import reference
from ascend_attn_ops._core.device_limits import table
from ascend_attn_ops._core.sparse_modes import compressed_mask
from support.tolerance import assert_same_bits
from torch import Tensor

PAGES = ("rows", "heads", "fractals")
N, NK, D = 4, 2, 64


def paged(contiguous: Tensor, block_table: Tensor, form: str, block_size: int) -> Tensor:
    """(B, Nk, S, D) in the blocks of a cache; what is nobody's is NaN."""
    batch, heads, tokens, size = contiguous.shape
    blocks = int(block_table.max()) + 1
    cache = torch.full((blocks, heads, block_size, size), torch.nan, dtype=contiguous.dtype)
    for b in range(batch):
        for j in range(tokens):
            cache[block_table[b, j // block_size], :, j % block_size] = contiguous[b, :, j]
    if form == "rows":
        return cache.transpose(1, 2).flatten(2).contiguous()
    return (
        cache.unflatten(3, (-1, 16)).transpose(2, 3).contiguous() if form == "fractals" else cache
    )


def tensors(sq: int, skv: int, batch: int = 3, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(sq + skv)
    query = torch.randn(batch, N, sq, D).to(dtype)
    key, value = torch.randn(2, batch, NK, skv, D).to(dtype)
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"layout": "BNSD", "return_softmax_lse": True, **options}
    return ops.fused_infer_attention_score(
        query, key, value, num_heads=N, num_key_value_heads=NK, **options
    )


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("form", PAGES)
@pytest.mark.parametrize(("sq", "mode"), [(1, 3), (5, 3), (40, 4)])
def test_pages_are_contiguous_keys(form: str, block_size: int, sq: int, mode: int) -> None:
    """Bit for bit, and nothing behind the keys is read: other rows of the cache are NaN."""
    query, key, value = tensors(sq, 300)
    lengths = [300, 33, 129]
    options = {"sparse_mode": mode, "pre_tokens": 70, "actual_seq_lengths_key": lengths}
    expected = attend(query, key, value, **options)
    used = -(-300 // block_size)
    blocks = torch.randperm(3 * used).view(3, used).int()
    pages = [paged(x, blocks, form, block_size) for x in (key, value)]
    for b, length in enumerate(lengths):
        for at in range(-(-length // block_size), used):
            for x in pages:
                x[blocks[b, at]] = torch.nan
            blocks[b, at] = 10**6
    assert all(map(torch.equal, attend(query, *pages, block_table=blocks, **options), expected))


def test_fractals_that_are_one_piece_of_memory() -> None:
    """Expanded ones, whose stride is 0."""
    fractal = torch.randn(2, NK, 1, 16, 16).bfloat16()
    query = torch.randn(1, N, 2, D).bfloat16()
    options = {
        "block_table": torch.tensor([[1, 0]], dtype=torch.int32), "actual_seq_lengths_key": [20],
    }  # fmt: skip
    expanded = fractal.expand(-1, -1, D // 16, -1, -1)
    actual = attend(query, expanded, expanded, **options)
    assert_same_bits(actual, attend(query, *[expanded.contiguous()] * 2, **options))


@pytest.mark.parametrize("form", PAGES)
def test_pages_before_a_window_are_not_read(form: str) -> None:
    """They may belong to others by now: their numbers are those of no block, or their rows NaN."""
    query, key, value = tensors(3, 300)
    options = {"sparse_mode": 4, "pre_tokens": 70, "next_tokens": 0}
    lengths = [300, 120, 40]
    expected = attend(query, key, value, actual_seq_lengths_key=lengths, **options)
    blocks = torch.randperm(3 * 19).view(3, 19).int()
    pages = [paged(x, blocks, form, 16) for x in (key, value)]
    for b, length in enumerate(lengths):
        before = max(length - 3 - 70, 0) // 16
        for x in pages:
            x[blocks[b, :before].long()] = torch.nan
        blocks[b, : before // 2] = -1
    options["actual_seq_lengths_key"] = lengths
    actual = attend(query, *pages, block_table=blocks, **options)
    assert torch.allclose(actual[0].float(), expected[0].float(), rtol=2**-7, atol=2**-9)
    assert torch.allclose(actual[1], expected[1], rtol=1e-5, atol=1e-5)


def test_pages_behind_a_band_are_not_read() -> None:
    """Their numbers may be anything, in the reference too."""
    query, key, value = tensors(1, 40)
    pages = [paged(x, torch.arange(3 * 3).view(3, 3).int(), "rows", 16) for x in (key, value)]
    blocks = torch.tensor([[0, 1, 2**31 - 1], [3, 4, -1], [6, 7, 99]], dtype=torch.int32)
    call = {
        "num_heads": N, "num_key_value_heads": NK, "layout": "BNSD", "scale_value": 0.2,
        "atten_mask": torch.zeros(3, 48, dtype=torch.bool), "next_tokens": 20,
        "block_table": blocks, "actual_seq_lengths_key": [40, 35, 33], "block_size": 16,
    }  # fmt: skip
    actual = ops.fused_infer_attention_score(query, *pages, **call)
    expected = reference.fused_infer_attention_score(query, *pages, **call)
    assert torch.allclose(actual[0].float(), expected[0].float(), rtol=2**-7, atol=2**-9)
    call["next_tokens"] = 33
    with pytest.raises(ValueError, match=r"block_table: .* in 0\.\.8, got 2147483647"):
        ops.fused_infer_attention_score(query, *pages, **call)


@pytest.mark.parametrize("sink", [None, torch.tensor([-1.0, 0.0, 3.0, -torch.inf])])
def test_dead_rows(sink: Tensor | None) -> None:
    """They are 0; their lse is that of no key, or the sink, but where they are no rows."""
    query, key, value = tensors(6, 9)
    out, lse = attend(
        query, key, value, sink=sink, sparse_mode=3, actual_seq_lengths_query=[6, 2, 6],
        actual_seq_lengths_key=[4, 9, 0],
    )  # fmt: skip
    dead = torch.zeros(3, 6, dtype=torch.bool)
    dead[0, :2] = dead[2] = True
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 2:] = True
    nothing = (dead | padding)[:, None, :, None]
    assert not out.masked_select(nothing).any()
    assert out.masked_select(~nothing).all()
    lowest = torch.full((N,), -torch.inf) if sink is None else sink
    lse = lse[..., 0].transpose(1, 2)
    assert torch.equal(lse[dead], lowest.expand(8, N))
    assert torch.equal(lse[padding], torch.full((4, N), -torch.inf))


def test_the_function_builds_the_compressed_mask_and_the_scale() -> None:
    query, key, value = tensors(6, 9)
    mask = compressed_mask(3, torch.device("cpu"))
    assert_same_bits(
        attend(query, key, value, sparse_mode=3),
        attend(query, key, value, sparse_mode=3, atten_mask=mask, scale_value=D**-0.5),
    )
    packed = [x.transpose(0, 1).flatten(1, 2) for x in (query, key, value)]
    ends = {"actual_seq_lengths_query": [6, 12, 18], "actual_seq_lengths_key": [9, 18, 27]}
    out, _ = attend(*packed, layout="NTD_TND", **ends)
    assert torch.equal(out.unflatten(0, (3, 6)).transpose(1, 2), attend(query, key, value)[0])


def test_products() -> None:
    (row,) = (row for row in table() if row["operator"] == "fused_infer_attention_score")
    devices = {"A2:8.5", "A2:9.0", "A2:9.1", "A3:8.5", "A3:9.0", "A3:9.1", "950:9.0", "950:9.1"}
    assert {f"{product}:{cann}" for product, cann in row["devices"]} == devices
    assert all(x["dtypes"] == ["float16", "bfloat16"] for x in row["devices"].values())


@pytest.mark.parametrize("case", [*DEVICE_CASES, *INT8_CASES], ids=lambda case: case.id)
@pytest.mark.parametrize("product", ["A2", "A3", "950"])
def test_the_samples_of_devices_are_within_the_limits(case: InferCase, product: Any) -> None:
    sample = build(case, torch.bfloat16).to("meta")
    refused = pytest.raises(ValueError, match="key_antiquant_scale: expected None on Ascend 950")
    with ops.limits(product), refused if case.quant and product == "950" else nullcontext():
        sample.call(torch.ops.ascend)
