"""flash-attn's functions on the NPU: the CPU's results, and how often they wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cann_simulator
import pytest
import torch
from ascend_attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    register_flash_attention_impl,
)
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

CU_Q, CU_K = [0, 5, 5, 12, 13], [0, 9, 12, 12, 40]


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).bfloat16()


def cu(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def to_npu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.npu() if isinstance(x, Tensor) else x.copy() if isinstance(x, list) else x
        for name, x in arguments.items()
    }


def assert_like_the_cpu(function: Any, arguments: dict[str, Any], wrt: tuple[str, ...]) -> None:
    results = []
    for given in (arguments, to_npu(arguments)):
        leaves = [given[name].detach().clone().requires_grad_() for name in wrt]
        given = given | dict(zip(wrt, leaves, strict=True))
        out, lse, *_ = function(**given)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else ()
        assert out.device == given["q"].device
        results.append(tuple(x.detach().cpu() for x in (out, lse, *gradients)))
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"window_size": (3, 1)}, {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"causal": True, "s_aux": torch.tensor([0.5, -1.0])},
    ],
    ids=["all", "causal", "window", "alibi", "sink"],
)  # fmt: skip
def test_dense_and_packed(options: dict[str, Any]) -> None:
    options = {**options, "return_attn_probs": True}
    dense = {"q": bf16(2, 6, 2, 16), "k": bf16(2, 9, 1, 16), "v": bf16(2, 9, 1, 16)}
    assert_like_the_cpu(flash_attn_func, dense | options, ("q", "k", "v"))
    if "alibi_slopes" in options:
        options["causal"] = True
    packed = {
        "q": bf16(13, 2, 16), "k": bf16(40, 1, 16), "v": bf16(40, 1, 16),
        "cu_seqlens_q": cu(CU_Q), "cu_seqlens_k": cu(CU_K), "max_seqlen_q": 7, "max_seqlen_k": 28,
    }  # fmt: skip
    assert_like_the_cpu(flash_attn_varlen_func, packed | options, ("q", "k", "v"))


@pytest.mark.parametrize("paged", [False, True])
def test_with_kvcache(paged: bool) -> None:
    arguments = {
        "q": bf16(2, 1, 2, 16), "k_cache": bf16(4, 8, 1, 16), "v_cache": bf16(4, 8, 1, 16),
        "k": bf16(2, 1, 1, 16), "v": bf16(2, 1, 1, 16), "cache_seqlens": cu([3, 6]),
        "causal": True, "return_softmax_lse": True,
    }  # fmt: skip
    if paged:
        arguments["block_table"] = cu([3, 1, 0, 2]).view(2, 2)
    assert_like_the_cpu(flash_attn_with_kvcache, arguments, ())


@pytest.mark.parametrize(("place", "waits"), [(Tensor.npu, 2), (Tensor.cpu, 0), (Tensor.tolist, 0)])
def test_lengths_on_the_host_do_not_wait(place: Callable[[Tensor], Any], waits: int) -> None:
    """Each tensor on the NPU waits, in the forward and in the backward."""
    leaves = [bf16(n, 2, 16).npu().requires_grad_() for n in (13, 40, 40)]
    lengths = [place(cu(x)) for x in (CU_Q, CU_K)]
    before = cann_simulator.waits()
    out = flash_attn_varlen_func(*leaves, *lengths, max_seqlen_q=7, max_seqlen_k=28)
    assert cann_simulator.waits() == before + waits
    out.backward(torch.ones_like(out))
    assert cann_simulator.waits() == before + 2 * waits


def test_deterministic_is_asked_of_torch(set_determinism: Any) -> None:
    x = bf16(1, 4, 2, 16).npu()
    with pytest.raises(NotImplementedError, match=r"use_deterministic_algorithms\(True\)"):
        flash_attn_func(x, x, x, deterministic=True)
    set_determinism(True)
    flash_attn_func(x, x, x, deterministic=True)


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason=f"torch {torch.__version__} has no register_flash_attention_impl, which 2.10 brought",
)
def test_varlen_attn_of_torch() -> None:
    from torch.nn.attention.varlen import varlen_attn

    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("ascend")
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        leaves = [bf16(n, 2, 16).to(device).requires_grad_() for n in (13, 40, 40)]
        out = varlen_attn(*leaves, cu(CU_Q).to(device), cu(CU_K).to(device), 7, 28)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append(tuple(x.detach().cpu() for x in (out, *gradients)))
    assert_same_bits(*results)
