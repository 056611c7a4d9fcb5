"""Attention sinks and separate ropes of flash_attention_score."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import attention, causal, to_layout
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.func import grad, jacrev, vmap

pytestmark = pytest.mark.usefixtures("no_limits")

BATCH, N, NK, SQ, SKV, D, DR = 2, 4, 2, 6, 9, 8, 4
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def all_inputs(
    dtype: torch.dtype = torch.float64, key_heads: int = NK, batch: int = BATCH
) -> list[Tensor]:
    """query, key, value, sink, query_rope and key_rope in BNSD."""
    generator = torch.Generator().manual_seed(0)
    keys = batch, key_heads, SKV
    shapes = [(batch, N, SQ, D), (*keys, D), (*keys, D), (N,), (batch, N, SQ, DR), (*keys, DR)]
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return ops.flash_attention_score(
        query, key, value, **{"num_heads": N, "layout": "BNSD", **options}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys(dtype: torch.dtype) -> None:
    query, key, value = all_inputs(dtype, N)[:3]
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
    tensors = [x.requires_grad_() for x in all_inputs(dtype, N)[:3]]
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
    query, key, value = all_inputs(torch.bfloat16, N)[:3]
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
    query, key, value = all_inputs(dtype, key_heads)[:3]
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
    query, key, value = all_inputs(torch.float64, N)[:3]
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


# Under the transformations of torch.func.

Function = Callable[..., Tensor]


def attend_causally(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, query_rope: Tensor, key_rope: Tensor
) -> Tensor:
    ropes = {"query_rope": query_rope, "key_rope": key_rope}
    return attend(query, key, value, sparse_mode=3, sink=sink, **ropes)[0]


def stated(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, query_rope: Tensor, key_rope: Tensor
) -> Tensor:
    """The same in plain torch, in float64."""
    query, key = (torch.cat(x, -1) for x in ((query, query_rope), (key, key_rope)))
    seen = causal(query.shape[2], key.shape[2])
    return attention(query, key, value, seen, (D + DR) ** -0.5, sink=sink)[0]


def results(function: Function, tensors: list[Tensor]) -> list[Tensor]:
    """out and all gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    d_out = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("shared", [True, False], ids=["one sink", "a sink for each"])
def test_mapped(shared: bool) -> None:
    """vmap of the function, of its gradient, and the gradient of the mapped function."""
    query, key, value, sink, *ropes = all_inputs(batch=6)
    several = [x.unflatten(0, (3, 2)) for x in (query, key, value, *ropes)]
    sinks = sink if shared else torch.stack((sink, -sink, sink + 1))
    tensors = [*several[:3], sinks, *several[3:]]
    axes = (0, 0, 0, None if shared else 0, 0, 0)
    mapped = vmap(attend_causally, in_dims=axes)

    def one_by_one(*x: Tensor) -> Tensor:
        each = [[y if axis is None else y[i] for y, axis in zip(x, axes, strict=True)]
                for i in range(3)]  # fmt: skip
        return torch.stack([stated(*y) for y in each])

    torch.testing.assert_close(results(mapped, tensors), results(one_by_one, tensors))

    def loss(*x: Tensor) -> Tensor:
        return attend_causally(*x).sin().sum()

    found = vmap(grad(loss, tuple(range(6))), in_dims=axes)(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = list(torch.autograd.grad(one_by_one(*leaves).sin().sum(), leaves))
    if shared:
        assert found[3].shape == (3, N)
        found = (*found[:3], found[3].sum(0), *found[4:])
    torch.testing.assert_close(list(found), expected)


def test_rows_of_a_jacobian() -> None:
    query, key, value, sink, *ropes = (x[:1] if x.dim() > 1 else x for x in all_inputs())

    def of_sink(function: Function, x: Tensor) -> Tensor:
        return function(query, key, value, x, *ropes)[0, :, -1, 0]

    found, expected = (jacrev(partial(of_sink, x))(sink) for x in (attend_causally, stated))
    torch.testing.assert_close(found, expected)
    # A head knows its own sink.
    assert torch.equal(found != 0, torch.eye(N, dtype=torch.bool))
