"""Calls with sinks and ropes of the public function under the transformations of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import attention, causal
from torch import Tensor
from torch.func import grad, jacrev, vmap

pytestmark = pytest.mark.usefixtures("no_limits")

N, NK, D, DR = 4, 2, 8, 4
Function = Callable[..., Tensor]


def inputs(
    dtype: torch.dtype = torch.float64, lengths: tuple[int, int] = (6, 9), batch: int = 2
) -> list[Tensor]:
    """query, key, value, sink, query_rope and key_rope in BNSD."""
    generator = torch.Generator().manual_seed(0)
    q, k = lengths
    shapes: list[tuple[int, ...]] = [
        (batch, N, q, D), (batch, NK, k, D), (batch, NK, k, D), (N,), (batch, N, q, DR),
        (batch, NK, k, DR),
    ]  # fmt: skip
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def attend(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, query_rope: Tensor, key_rope: Tensor
) -> Tensor:
    out, *_ = ops.flash_attention_score(
        query, key, value, num_heads=N, layout="BNSD", sparse_mode=3, sink=sink,
        query_rope=query_rope, key_rope=key_rope,
    )  # fmt: skip
    return out


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
    query, key, value, sink, *ropes = inputs(batch=6)
    several = [x.unflatten(0, (3, 2)) for x in (query, key, value, *ropes)]
    sinks = sink if shared else torch.stack((sink, -sink, sink + 1))
    tensors = [*several[:3], sinks, *several[3:]]
    axes = (0, 0, 0, None if shared else 0, 0, 0)
    mapped = vmap(attend, in_dims=axes)

    def one_by_one(*x: Tensor) -> Tensor:
        each = [[y if axis is None else y[i] for y, axis in zip(x, axes, strict=True)]
                for i in range(3)]  # fmt: skip
        return torch.stack([stated(*y) for y in each])

    torch.testing.assert_close(results(mapped, tensors), results(one_by_one, tensors))

    def loss(*x: Tensor) -> Tensor:
        return attend(*x).sin().sum()

    found = vmap(grad(loss, tuple(range(6))), in_dims=axes)(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = list(torch.autograd.grad(one_by_one(*leaves).sin().sum(), leaves))
    if shared:
        assert found[3].shape == (3, N)
        found = (*found[:3], found[3].sum(0), *found[4:])
    torch.testing.assert_close(list(found), expected)


def test_rows_of_a_jacobian() -> None:
    query, key, value, sink, *ropes = (x[:1] if x.dim() > 1 else x for x in inputs())

    def of_sink(function: Function, x: Tensor) -> Tensor:
        return function(query, key, value, x, *ropes)[0, :, -1, 0]

    found, expected = (jacrev(partial(of_sink, x))(sink) for x in (attend, stated))
    torch.testing.assert_close(found, expected)
    # A head knows its own sink.
    assert torch.equal(found != 0, torch.eye(N, dtype=torch.bool))
