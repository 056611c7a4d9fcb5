"""Calls with sinks and ropes of the public function, compiled, exported, mapped and recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import attention, causal
from support.dispatched import Calls
from support.tolerance import assert_same_bits
from support.torch_defects import EXPORT_LOSES_STAR_ARGUMENTS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


def test_plain() -> None:
    torch.testing.assert_close(results(attend, inputs()), results(stated, inputs()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_once_for_all_sizes(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for batch, lengths in ((3, (6, 9)), (5, (10, 12)), (7, (11, 17))):
        tensors = inputs(dtype, lengths, batch)
        assert_same_bits(results(compiled, tensors), results(attend, tensors))
        frames.append(counter.frame_count)
    # torch may start the first trace again.
    assert frames == frames[:1] * 3


@EXPORT_LOSES_STAR_ARGUMENTS
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink = torch.nn.Parameter(inputs()[3].bfloat16())

        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, q_rope: Tensor, k_rope: Tensor
        ) -> Tensor:
            return attend(q, k, v, self.sink, q_rope, k_rope)

    def given(*args: Any) -> list[Tensor]:
        tensors = inputs(torch.bfloat16, *args)
        return [x for i, x in enumerate(tensors) if i != 3]

    layer, tensors = Layer(), given()
    sizes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},) * 5
    program = torch.export.export(layer, tuple(tensors), dynamic_shapes=sizes, strict=strict)
    for call in (tensors, given((7, 12), 3)):
        assert torch.equal(program.module()(*call), layer(*call))


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


def test_kept_by_the_policy() -> None:
    keeping = partial(create_selective_checkpoint_contexts, ops.save_attention_policy)

    def recomputing(*x: Tensor) -> Tensor:
        return checkpoint(attend, *x, use_reentrant=False, context_fn=keeping)

    with Calls() as calls:
        found = results(recomputing, inputs(torch.float32))
    assert calls.count["flash_attention_score"] == 1
    assert calls.count["_flash_attention_score_extended_grad"] == 1
    assert_same_bits(found, results(attend, inputs(torch.float32)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_under_autocast(compiled: bool) -> None:
    """The sink stays float32; gradients have the dtype of their leaves."""
    torch._dynamo.reset()
    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    tensors = inputs(torch.float32)
    tensors[3] = torch.full((N,), 1.00390625 + 2**-20)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out = function(*leaves)
    half = [x if i == 3 else x.bfloat16() for i, x in enumerate(tensors)]
    cast = [x.clone().requires_grad_() for x in half]
    expected = attend(*cast)
    assert torch.equal(out, expected)
    d_out = torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16()
    found, wanted = (torch.autograd.grad(x, y, d_out) for x, y in ((out, leaves), (expected, cast)))
    for d, y in zip(found, wanted, strict=True):
        assert d.dtype == torch.float32
        assert torch.equal(d, y.float())
