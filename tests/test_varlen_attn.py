"""torch's varlen_attn with the operators as its flash attention: on the CPU torch has none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.flash_attn import flash_attn_varlen_func, register_flash_attention_impl
from support.flash_attention_in_torch import assert_gradients, attend_packed, cu, in_blocks, packed
from torch import Tensor

HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")
N = 4
CU_Q, CU_K = [0, 5, 5, 12, 13], [0, 9, 12, 12, 40]


@pytest.fixture
def varlen_attn(no_limits: None) -> Iterator[Callable[..., Any]]:
    if not HAS_REGISTRY:
        pytest.skip(f"torch {torch.__version__} has no registry of implementations, as 2.10 has")
    from torch.nn.attention.varlen import varlen_attn

    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("ascend")
    yield varlen_attn
    if hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        torch.nn.attention.restore_flash_attention_impl()


def needs(argument: str) -> None:
    from torch.nn.attention.varlen import varlen_attn

    if argument not in inspect.signature(varlen_attn).parameters:
        pytest.skip(f"varlen_attn of torch {torch.__version__} has no {argument}")


def window(left: int, right: int) -> dict[str, Any]:
    """As this torch wants it: 2.10 knows is_causal alone."""
    if (left, right) == (-1, -1):
        return {}
    if (left, right) == (-1, 0):
        from torch.nn.attention.varlen import varlen_attn

        if "is_causal" in inspect.signature(varlen_attn).parameters:
            return {"is_causal": True}
    needs("window_size")
    return {"window_size": (left, right)}


tensors = partial(packed, CU_Q, CU_K, size=16)
LENGTHS = cu(CU_Q), cu(CU_K), 7, 28


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("bounds", [(-1, -1), (-1, 0), (3, 0), (4, 2), (2, -1), (0, 0)], ids=str)
@pytest.mark.parametrize("key_heads", [N, 2])
def test_forward_and_backward(
    varlen_attn: Callable[..., Any], key_heads: int, bounds: tuple[int, int], behind: int
) -> None:
    options = window(*bounds)
    if key_heads < N:
        needs("enable_gqa")
        options["enable_gqa"] = True
    leaves = [x.requires_grad_() for x in tensors(key_heads, behind=behind)]
    out = varlen_attn(*leaves, *LENGTHS, **options)
    expected, _ = attend_packed(*leaves, CU_Q, CU_K, window_size=bounds)
    # The statistics for the backward are float32.
    assert_gradients(out, expected, leaves, tolerance=1e-5)


def test_a_window_of_one_key_under_the_limits(varlen_attn: Callable[..., Any]) -> None:
    leaves = [x.requires_grad_() for x in tensors(dtype=torch.float32, behind=2)]
    with ascend_attn_ops.limits("A2"):
        out = varlen_attn(*leaves, *LENGTHS, **window(0, 0))
        with pytest.raises(ValueError, match=r"pre_tokens: expected .* of at least 1 .* got 0"):
            out.sum().backward()
    expected, _ = attend_packed(*leaves, CU_Q, CU_K, window_size=(0, 0))
    torch.testing.assert_close(out, expected.float())


def test_autocast_leaves_it_alone(varlen_attn: Callable[..., Any]) -> None:
    leaves = [x.requires_grad_() for x in tensors(dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen_attn(*leaves, *LENGTHS)
    expected = varlen_attn(*leaves, *LENGTHS)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in leaves)


@pytest.mark.parametrize("behind", [0, 2])
def test_return_aux_and_scale(varlen_attn: Callable[..., Any], behind: int) -> None:
    from torch.nn.attention.varlen import AuxRequest

    needs("scale")
    leaves = [x.requires_grad_() for x in tensors(behind=behind)]
    aux = AuxRequest(lse=True)
    out, lse = varlen_attn(*leaves, *LENGTHS, return_aux=aux, scale=0.4, **window(-1, 0))
    expected, expected_lse = attend_packed(*leaves, CU_Q, CU_K, causal=True, softmax_scale=0.4)
    assert_gradients(out, expected, leaves, tolerance=1e-5)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_seqused_k_and_block_table(varlen_attn: Callable[..., Any], paged: bool) -> None:
    needs("block_table")
    q, k, v = tensors()
    used = [7, 0, 0, 20]
    whole = [torch.cat([x[a : a + n] for a, n in zip(CU_K, used, strict=False)]) for x in (k, v)]
    options: dict[str, Any] = {"seqused_k": cu(used), "window_size": (-1, 0)}
    keys = [k, v]
    cu_k: Tensor | None = LENGTHS[1]
    if paged:
        blocks = [in_blocks(x.split(used), 4) for x in whole]
        keys, cu_k = [cache for cache, _ in blocks], None
        options["block_table"] = blocks[0][1].clamp(min=0)
    with torch.no_grad():
        out = varlen_attn(q, *keys, LENGTHS[0], cu_k, 7, 28, **options)
    expected, _ = attend_packed(q, *whole, CU_Q, [0, 7, 7, 7, 27], causal=True)
    torch.testing.assert_close(out, expected)


def test_into_a_tensor(varlen_attn: Callable[..., Any]) -> None:
    from torch.nn.attention import varlen

    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip(f"torch {torch.__version__} has no varlen_attn_out")
    q, k, v = tensors()
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, k, v, *LENGTHS)
    assert torch.equal(out, varlen_attn(q, k, v, *LENGTHS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_same_as_flash_attn_varlen_func(
    varlen_attn: Callable[..., Any], dtype: torch.dtype
) -> None:
    inputs = tensors(dtype=dtype)
    expected = flash_attn_varlen_func(*inputs, *LENGTHS, causal=True)
    assert torch.equal(varlen_attn(*inputs, *LENGTHS, **window(-1, 0)), expected)


def test_compiles(varlen_attn: Callable[..., Any]) -> None:
    leaves = [x.requires_grad_() for x in tensors(dtype=torch.float32)]

    def loss(*x: Tensor) -> Tensor:
        return varlen_attn(*x, *LENGTHS, **window(-1, 0)).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss)]
    torch.testing.assert_close(*gradients)


def test_errors(varlen_attn: Callable[..., Any]) -> None:
    q, k, v = tensors()
    for cu_k, message in (
        (LENGTHS[1] + 1, r"cum_seq_k: .* of which the first is 0"),
        (LENGTHS[1].flip(0) - 40, r"cum_seq_k: .* never decrease, got -28 after 0 at 1 "),
    ):
        with pytest.raises(ValueError, match=message):
            varlen_attn(q, k, v, LENGTHS[0], cu_k, 7, 28)
    forward = torch.ops.aten._flash_attention_forward
    for change in ({"dropout_p": 0.1}, {"return_debug_mask": True}):
        arguments = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False, **change}
        with pytest.raises(NotImplementedError, match=f"{next(iter(change))}: expected"):
            forward(q, k, v, *LENGTHS, **arguments)
    with pytest.raises(TypeError, match="cum_seq_q: expected a tensor"):
        forward(q[None], k[None], v[None], None, None, 13, 40, 0.0, False, False)


def test_torch_alone_has_no_kernel_here(varlen_attn: Callable[..., Any]) -> None:
    """And has none again when it is told to restore its own."""
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} cannot restore its own implementation")
    inputs = tensors(dtype=torch.bfloat16)
    varlen_attn(*inputs, *LENGTHS)
    torch.nn.attention.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        varlen_attn(*inputs, *LENGTHS)
    torch.nn.attention.activate_flash_attention_impl("ascend")


def test_a_torch_without_the_registry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_REGISTRY:
        monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=r"expected 2\.10 .* got \d.*varlen_func needs"):
        register_flash_attention_impl()
