"""limits() belongs to a task, and a gradient is checked against the limits of its forward."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import nullcontext

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.device_limits import Device, device_in_force
from torch import Tensor

DEFAULT = Device("A2", "9.1")


def in_a_thread(function: Callable[[], object]) -> list[object]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results


def attention() -> tuple[Tensor, Tensor]:
    """Sizes that no device accepts: the query, and its output."""
    query = torch.randn(1, 3, 3, 8, requires_grad=True)
    key = torch.randn(1, 3, 1, 8)
    indices = torch.arange(3, dtype=torch.int32).expand(1, 3, 1, 3)
    out, *_ = torch.ops.ascend.sparse_flash_attention(query, key, key, indices, scale_value=0.3)
    return query, out


def test_tasks_that_interleave() -> None:
    seen = []

    async def outer(entered: asyncio.Event, left: asyncio.Event) -> None:
        with ascend_attn_ops.limits(None):
            entered.set()
            await left.wait()
            seen.append(device_in_force())
            attention()
        seen.append(device_in_force())

    async def inner(entered: asyncio.Event, left: asyncio.Event) -> None:
        await entered.wait()
        seen.append(device_in_force())
        with pytest.raises(TypeError, match="on Ascend A2"):
            attention()
        with ascend_attn_ops.limits("A3"):
            left.set()
            await asyncio.sleep(0.01)
            seen.append(device_in_force())

    async def both() -> None:
        entered, left = asyncio.Event(), asyncio.Event()
        await asyncio.gather(outer(entered, left), inner(entered, left))

    asyncio.run(both())
    assert seen == [DEFAULT, None, DEFAULT, ("A3", "9.1")]
    assert device_in_force() == DEFAULT


def test_threads() -> None:
    with ascend_attn_ops.limits(None):
        assert in_a_thread(device_in_force) == [DEFAULT]
        assert asyncio.run(asyncio.to_thread(device_in_force)) is None
        context = contextvars.copy_context()
    assert device_in_force() == DEFAULT
    assert in_a_thread(lambda: context.run(device_in_force)) == [None]


@pytest.mark.parametrize("elsewhere", ["here", "in a thread", "in another block"])
def test_a_gradient_has_the_limits_of_its_forward(elsewhere: str) -> None:
    with ascend_attn_ops.limits(None):
        query, out = attention()
    with ascend_attn_ops.limits("A3") if elsewhere == "in another block" else nullcontext():
        if elsewhere == "in a thread":
            in_a_thread(lambda: out.sum().backward())
        else:
            out.sum().backward()
    assert query.grad is not None


def test_a_gradient_is_not_checked_less_than_its_forward() -> None:
    seen = []
    query = torch.randn(1, 1, 1, 512, dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(1, 1, 1, 512, dtype=torch.bfloat16)
    rope = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32)

    def unpacked(x: Tensor) -> Tensor:
        seen.append(device_in_force())
        with ascend_attn_ops.limits("A3"):
            seen.append(device_in_force())
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpacked):
        out, *_ = torch.ops.ascend.sparse_flash_attention(
            query, key, key, indices, scale_value=0.04, query_rope=rope, key_rope=rope
        )
    with ascend_attn_ops.limits(None):
        out.sum().backward()
    assert set(seen) == {DEFAULT, ("A3", "9.1")}


def test_the_inner_block_holds_in_a_gradient() -> None:
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, d: Tensor) -> Tensor:  # type: ignore[override]
            with ascend_attn_ops.limits(None):
                attention()
            return d

    x = torch.ones(1, requires_grad=True)
    Recompute.apply(x).backward()
    assert device_in_force() == DEFAULT
