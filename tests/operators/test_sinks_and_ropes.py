"""Attention sinks and separate ropes of flash_attention_score."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import attention, to_layout
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

BATCH, N, SQ, SKV, D, DR = 2, 4, 6, 9, 8, 4
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def inputs(dtype: torch.dtype, heads: int = N) -> list[Tensor]:
    """Query, key and value in BNSD."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, N, SQ, D), (BATCH, heads, SKV, D), (BATCH, heads, SKV, D)]
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return ops.flash_attention_score(
        query, key, value, **{"num_heads": N, "layout": "BNSD", **options}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys(dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype)
    sink = torch.tensor([-3.0, 0.0, 2.5, -torch.inf], dtype=torch.promote_types(dtype, torch.float))
    every = torch.ones(SQ, SKV, dtype=torch.bool)
    out, softmax_max, softmax_sum = attend(
        query, key, value, sink=sink, atten_mask=every, sparse_mode=1
    )
    assert not out.any()
    assert torch.equal(softmax_max[:, :3], sink[:3].view(1, 3, 1, 1).expand(BATCH, 3, SQ, 8))
    assert (softmax_sum[:, :3] == 1).all()
    largest = torch.finfo(torch.float32).max
    assert (softmax_max[:, 3] == -largest).all()
    assert (softmax_sum[:, 3] == largest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype) -> None:
    tensors = [x.requires_grad_() for x in inputs(dtype)]
    sink = torch.full((N,), -torch.inf, dtype=torch.promote_types(dtype, torch.float))
    outputs, expected = attend(*tensors, sink=sink), attend(*tensors)
    assert_same_bits(outputs, expected)
    d_out = torch.ones_like(outputs[0])
    assert_same_bits(
        torch.autograd.grad(outputs[0], tensors, d_out),
        torch.autograd.grad(expected[0], tensors, d_out),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_sink_of_any_dtype_gets_a_gradient_of_it(dtype: torch.dtype) -> None:
    query, key, value = inputs(torch.bfloat16)
    sink = torch.tensor([-1.0, 0.5, 2.0, 0.0]).to(dtype).requires_grad_()
    exact = sink.detach().float().requires_grad_()
    outputs, expected = (attend(query, key, value, sink=x) for x in (sink, exact))
    assert_same_bits(outputs, expected)
    (d_sink,), (d_exact,) = (
        torch.autograd.grad(x[0].float().sum(), y) for x, y in ((outputs, sink), (expected, exact))
    )
    assert d_sink.dtype == dtype
    assert torch.equal(d_sink, d_exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
@pytest.mark.parametrize(("queries", "key_heads"), [(SQ, 2), (3, 2), (1, 2), (1, N)])
def test_ropes_are_a_part_of_the_heads(
    queries: int, key_heads: int, layout: str, dtype: torch.dtype
) -> None:
    """Bit for bit, forward and backward; a few rows of a key head are computed otherwise."""
    query, key, value = inputs(dtype, heads=key_heads)
    query = query[:, :, :queries].contiguous()
    generator = torch.Generator().manual_seed(1)
    ropes = [torch.randn(*x.shape[:3], DR, generator=generator).to(dtype) for x in (query, key)]

    options: dict[str, Any] = {"layout": layout, "sparse_mode": 3}
    if layout == "TND":
        options["actual_seq_lengths_query"] = [1, 2 * queries]
        options["actual_seq_lengths_key"] = [SKV - 1, 2 * SKV]
    leaves = [x.requires_grad_() for x in (query, key, value, *ropes)]
    parts = [to_layout(x, layout) for x in leaves]
    joined = [
        to_layout(torch.cat((x, y), -1), layout) for x, y in zip(leaves[:2], ropes, strict=True)
    ]
    # Both calls use the default scale, 1 / sqrt(D + Dr).
    outputs = attend(*parts[:3], query_rope=parts[3], key_rope=parts[4], **options)
    expected = attend(*joined, parts[2], **options)
    assert_same_bits(outputs, expected)
    d_out = torch.randn(outputs[0].shape, generator=generator).to(dtype)
    assert_same_bits(
        torch.autograd.grad(outputs[0], leaves, d_out),
        torch.autograd.grad(expected[0], leaves, d_out),
    )


def test_a_bias_beside_ropes_gets_its_gradient() -> None:
    query, key, value = inputs(torch.float64)
    ropes = [torch.randn(*x.shape[:3], DR).double() for x in (query, key)]
    sink, pse = torch.randn(N).double(), torch.randn(BATCH, N, SQ, SKV).double().requires_grad_()
    out = attend(query, key, value, pse_shift=pse, sink=sink, query_rope=ropes[0],
                 key_rope=ropes[1])[0]  # fmt: skip
    joined = [torch.cat(pair, -1) for pair in zip((query, key), ropes, strict=True)]
    scale = (D + DR) ** -0.5
    expected, _ = attention(*joined, value, None, scale, pse * scale, sink=sink)
    d_out = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, pse, d_out) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
