"""Sinks in flash-attn's functions: vLLM's s_aux, and FlashAttention-4's learnable_sink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_attn_ops import flash_attn, flash_attn_interface
from support.flash_attention_in_torch import assert_gradients, attend, attend_packed, cu
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, D = 2, 4, 2, 16
CU_Q, CU_K = [0, 5, 5, 12, 13], [0, 9, 12, 12, 40]
MODULES: list[Any] = [flash_attn, flash_attn_interface]
MASKS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (0, 0)},
    {"window_size": (4, 9), "causal": True},
]  # fmt: skip

each_module = pytest.mark.parametrize("module", MODULES, ids=["2", "3"])
each_name = pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
each_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of these shapes, and a sink."""
    return [randn(*x, seed=i).requires_grad_() for i, x in enumerate((*shapes, (N,)))]


def assert_as_stated(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, Tensor], tensors: list[Tensor]
) -> None:
    torch.testing.assert_close(actual[1], expected[1])
    assert_gradients(actual[0], expected[0], tensors)


@each_module
@each_name
@each_mask
@pytest.mark.parametrize(("sq", "skv"), [(7, 13), (13, 5)])
def test_sequences_of_one_length(
    module: Any, name: str, mask: dict[str, Any], sq: int, skv: int
) -> None:
    """Queries before the first key of the diagonal see the sink alone."""
    tensors = leaves((B, sq, N, D), (B, skv, NK, D), (B, skv, NK, D))
    q, k, v, sink = tensors
    actual = module.flash_attn_func(q, k, v, **mask, return_attn_probs=True, **{name: sink})
    assert_as_stated(actual, attend(q, k, v, **mask, s_aux=sink), tensors)


@each_module
@each_name
@each_mask
def test_packed_sequences(module: Any, name: str, mask: dict[str, Any]) -> None:
    tensors = leaves((13, N, D), (40, NK, D), (40, NK, D))
    q, k, v, sink = tensors
    actual = module.flash_attn_varlen_func(
        q, k, v, cu(CU_Q), cu(CU_K), 7, 28, **mask, return_attn_probs=True, **{name: sink}
    )
    assert_as_stated(actual, attend_packed(q, k, v, CU_Q, CU_K, **mask, s_aux=sink), tensors)


def test_rows_without_keys() -> None:
    """The log-sum-exp of a row is its sink; rows behind the last sequence belong to none."""
    q, k, sink = randn(6, N, D), randn(3, NK, D), randn(N)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, k, cu([0, 4, 4]), cu([0, 0, 3]), 4, 3, s_aux=sink, return_attn_probs=True
    )
    assert not out.any()
    assert torch.equal(lse[:, :4], sink[:, None].expand(N, 4))
    assert (lse[:, 4:] == torch.inf).all()
    no_keys = k[None, :0]
    for own in (sink, torch.full((N,), -torch.inf)):
        out, lse, _ = flash_attn.flash_attn_func(
            q[None], no_keys, no_keys, s_aux=own, return_attn_probs=True
        )
        expected = torch.where(own == -torch.inf, torch.inf, own.double())
        assert not out.any()
        assert torch.equal(lse[0], expected[:, None].expand(N, 6))


def test_slopes_beside_a_sink() -> None:
    tensors = leaves((B, 7, N, D), (B, 13, NK, D), (B, 13, NK, D))
    q, k, v, sink = tensors
    slopes = torch.rand(N) + 0.1
    for mask in ({}, {"causal": True}):
        actual = flash_attn.flash_attn_func(
            q, k, v, **mask, alibi_slopes=slopes, s_aux=sink, return_attn_probs=True
        )
        expected = attend(q, k, v, **mask, alibi_slopes=slopes, s_aux=sink)
        assert_as_stated(actual, expected, tensors)


def test_slopes_of_packs_that_would_move_the_scores_against_the_sink() -> None:
    q, k, sink = randn(13, N, D), randn(40, NK, D), randn(N)
    call = (q, k, k, cu(CU_Q), cu(CU_K), 7, 28)
    options = {"causal": True, "alibi_slopes": torch.rand(N) + 0.1}
    assert flash_attn.flash_attn_varlen_func(*call, **options).shape == q.shape
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: expected beside a sink one seq"):
        flash_attn.flash_attn_varlen_func(*call, **options, s_aux=sink)


def test_half_precision_and_autocast() -> None:
    """The sink is not rounded to the dtype of the others."""
    q, k, v = (randn(B, 9, n, D, seed=n).bfloat16() for n in (N, NK, NK))
    sink = torch.full((N,), 1.00390625 + 2**-20)
    out = flash_attn.flash_attn_func(q, k, v, s_aux=sink)
    with torch.autocast("cpu", torch.bfloat16):
        again = flash_attn.flash_attn_func(q.float(), k.float(), v.float(), learnable_sink=sink)
    assert torch.equal(again, out)
    half = sink.bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(
        flash_attn.flash_attn_func(q, k, v, s_aux=half).float().sum(), half
    )
    assert gradient.dtype == torch.bfloat16


def test_a_cache_gives_no_gradient_to_a_sink() -> None:
    sink = torch.zeros(N, requires_grad=True)
    q, cache = randn(B, 1, N, D), randn(B, 8, NK, D)
    with pytest.raises(NotImplementedError, match=r"s_aux: expected no gradient .*torch\.no_grad"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, s_aux=sink)
    with torch.no_grad():
        flash_attn.flash_attn_with_kvcache(q, cache, cache, s_aux=sink)
