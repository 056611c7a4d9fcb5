"""sparse_flash_attention's value has key's numbers, as on the device, in any tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TOKENS, HEADS, D, DR, K = 6, 8, 512, 64, 2048


def bfloat16(*shape: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(1, TOKENS, *shape, generator=generator).bfloat16().to(device)


def arguments(device: str = "cpu") -> dict[str, Any]:
    """Within the limits of Atlas A2, all but key and value."""
    indices = torch.arange(K, dtype=torch.int32).expand(1, TOKENS, 1, K)
    return {
        "query": bfloat16(HEADS, D, device=device),
        "sparse_indices": indices.where(indices < TOKENS, -1).to(device),
        "query_rope": bfloat16(HEADS, DR, device=device),
        "key_rope": bfloat16(1, DR, device=device), "scale_value": 192**-0.5,
    }  # fmt: skip


def attend(key: Tensor, value: Tensor, others: dict[str, Any] | None = None) -> Tensor:
    others = arguments(key.device.type) if others is None else others
    return ops.sparse_flash_attention(key=key, value=value, **others)[0]


def test_the_limits_refuse_other_numbers() -> None:
    key = bfloat16(1, D)
    other = key.clone()
    other[0, -1, 0, -1] += 1
    with ops.limits(None):
        out = attend(key, other)
    statistics = torch.ones(1, 1, TOKENS, HEADS)
    expected = "value: expected key's numbers"
    with pytest.raises(ValueError, match=f"sparse_flash_attention: {expected}"):
        attend(key, other)
    with pytest.raises(ValueError, match=f"sparse_flash_attention_grad: {expected}"):
        ops.sparse_flash_attention_grad(
            key=key, value=other, d_out=out, out=out, softmax_max=statistics,
            softmax_sum=statistics, **arguments(),
        )  # fmt: skip


def test_numbers_in_two_leaves() -> None:
    """Each gets its part of the gradient."""
    key, value = (bfloat16(1, D).requires_grad_() for _ in range(2))
    out = attend(key, value)
    assert torch.equal(out, both(bfloat16(1, D)))
    out.float().square().sum().backward()
    assert key.grad is not None
    assert value.grad is not None
    torch.testing.assert_close(key.grad + value.grad, gradient(both))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "value_of", [Tensor.detach, lambda x: x.view(x.shape), lambda x: x[:], Tensor.clone],
    ids=["detach", "view", "slice", "copy"],
)  # fmt: skip
def test_the_same_numbers_are_key(value_of: Callable[[Tensor], Tensor], device: str) -> None:
    key = bfloat16(1, D, device=device).requires_grad_()
    out = attend(key, value_of(key))
    out.float().square().sum().backward()
    if device == "cpu":
        assert torch.equal(out, attend(key, key))


def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
    latent = bfloat16(1, D).requires_grad_()
    call(latent).float().square().sum().backward()
    assert latent.grad is not None
    return latent.grad


def both(latent: Tensor) -> Tensor:
    return attend(latent, latent)


def with_views(key: Tensor, value: Tensor, others: dict[str, Any] | None = None) -> Tensor:
    return attend(key[:, :], value[:, :], others)


def within(
    context: Callable[[], Any], call: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    def in_context(latent: Tensor) -> Tensor:
        with context():
            return call(latent)

    return in_context


def in_one_graph(call: Callable[..., Tensor], latent: Tensor) -> Tensor:
    torch._dynamo.reset()
    function = torch.compile(call, backend="aot_eager", fullgraph=True)
    return function(latent, latent, arguments())


copies = partial(torch.autograd.graph.saved_tensors_hooks, Tensor.clone, Tensor.clone)
autocast = partial(torch.autocast, "cpu", torch.bfloat16)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "saved on the CPU": within(torch.autograd.graph.save_on_cpu, both),
    "saved as copies": within(copies, both),
    "with a view": within(copies, lambda latent: with_views(latent, latent)),
    "under autocast": within(autocast, lambda latent: both(latent.float())),
    "checkpointed": partial(checkpoint, both, use_reentrant=False),
    "checkpointed by reentrance": partial(checkpoint, both, use_reentrant=True),
    "compiled": partial(in_one_graph, attend),
    "compiled with views": partial(in_one_graph, with_views),
}


@pytest.mark.parametrize("call", CALLS)
def test_value_stays_key(call: str) -> None:
    assert torch.equal(gradient(CALLS[call]), gradient(both))


def test_a_tensor_is_saved_once() -> None:
    saved: list[Tensor] = []
    latent = bfloat16(1, D).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend(latent, latent)
    assert [x.data_ptr() for x in saved].count(latent.data_ptr()) == 1


def test_a_detached_value_under_autocast() -> None:
    """It is cast with key, and gets no gradient."""
    latent = bfloat16(1, D).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        attend(latent, latent.detach()).float().square().sum().backward()
    half = latent.detach().bfloat16().requires_grad_()
    attend(half, half.detach()).float().square().sum().backward()
    assert latent.grad is not None
    assert half.grad is not None
    assert torch.equal(latent.grad, half.grad.float())
