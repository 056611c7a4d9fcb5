"""torch_npu's cache writes, merges and layers on the CPU against plain torch."""

from __future__ import annotations

import ascend_attn_ops
import pytest
import torch
from support.attention import attention
from support.npu_names import torch_npu
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_limits")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_cache_writes() -> None:
    key, value = torch.randn(2, 3, 2, 32).bfloat16().unbind()
    slots = torch.tensor([17, -1, 2], dtype=torch.int32)
    zeros = torch.zeros(4, 16, 2, 32, dtype=torch.bfloat16)
    expected = []
    for rows in (key, value):
        cache = zeros.clone()
        cache[1, 1], cache[0, 2] = rows[0], rows[2]
        expected.append(cache)
    for write in (
        lambda *x: torch_npu.npu_scatter_pa_kv_cache(*x, cache_mode="Norm"),
        torch_npu._npu_reshape_and_cache,
    ):
        caches = zeros.clone(), zeros.clone()
        assert write(key, value, *caches, slots) is None
        assert_close(caches, tuple(expected), rtol=0, atol=0)
    # Unless told otherwise, caches are fractal.
    caches = ascend_attn_ops.nd_to_nz(zeros), ascend_attn_ops.nd_to_nz(zeros)
    torch_npu.npu_scatter_pa_kv_cache(key, value, *caches, slots)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, ascend_attn_ops.nd_to_nz(wanted))


def test_attention_update() -> None:
    lse, outs = torch.randn(3, 5).double(), torch.randn(3, 5, 8).double()
    expected = (lse.softmax(0)[..., None] * outs).sum(0)
    out, lse_out = torch_npu.npu_attention_update(list(lse), list(outs), 1)
    assert_close(out, expected)
    assert_close(lse_out, lse.logsumexp(0))
    out, lse_out = torch_npu.npu_attention_update(list(lse), list(outs), 0)
    assert_close(out, expected)
    assert lse_out is None


def test_ring_update() -> None:
    """Two halves of the keys, merged, are all of them."""
    query, key, value = (drawn(s, 2, 8 * n).detach() for s, n in ((5, 4), (6, 2), (6, 2)))
    halves = zip(key.chunk(2), value.chunk(2), strict=True)
    parts = [torch_npu.npu_fusion_attention(query, *x, 4, "SBH")[:3] for x in halves]
    merged = torch_npu.npu_ring_attention_update(*parts[0], *parts[1])
    assert_close(merged, torch_npu.npu_fusion_attention(query, key, value, 4, "SBH")[:3])


def test_ring_update_of_packed_sequences() -> None:
    torch.manual_seed(0)
    query, keys, values = (drawn(*x, 8).detach() for x in ((8, 4), (2, 6, 2), (2, 6, 2)))
    ends = {"actual_seq_qlen": [3, 3, 8], "actual_seq_kvlen": [2, 3, 6]}
    halves = zip(keys, values, strict=True)
    parts = [torch_npu.npu_fusion_attention(query, *x, 4, "TND", **ends)[:3] for x in halves]
    out, maximum, total = torch_npu.npu_ring_attention_update(
        *parts[0], *parts[1], input_layout="TND", actual_seq_qlen=torch.tensor([0, 3, 3, 8])
    )
    statistics = []
    for q0, q1, k0, k1 in ((0, 3, 0, 2), (3, 8, 3, 6)):
        pairs = (torch.cat([x[k0:k1] for x in y]) for y in (keys, values))
        expected, lse = attention(*(x.transpose(0, 1)[None] for x in (query[q0:q1], *pairs)))
        assert_close(out[q0:q1], expected[0].transpose(0, 1))
        statistics.append(lse.flatten())
    assert_close((maximum + total.log())[..., 0].flatten(), torch.cat(statistics))
    # With statistics by token, as (T, N, 8).
    by_token = [
        (x, *(torch.cat([_by_token(y, 0, 3), _by_token(y, 3, 8)]) for y in statistics))
        for x, *statistics in parts
    ]
    again, *_ = torch_npu.npu_ring_attention_update(
        *by_token[0], *by_token[1], input_layout="TND", input_softmax_layout="TND"
    )
    assert_close(again, out)


def _by_token(statistic: Tensor, begin: int, end: int) -> Tensor:
    return statistic[begin:end].reshape(4, end - begin, 8).transpose(0, 1)


def test_rms_norm() -> None:
    x, other, gamma = drawn(2, 3, 8), drawn(2, 3, 8), drawn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), gamma, eps=1e-3)
    out, rstd = torch_npu.npu_rms_norm(x, gamma, 1e-3)
    assert_close(out, expected)
    assert rstd.shape == (2, 3, 1)
    gradients = torch.autograd.grad(expected.square().sum(), [x, gamma])
    assert_close(torch.autograd.grad(out.square().sum(), [x, gamma]), gradients)
    backward = torch_npu.npu_rms_norm_backward(2 * out, x, gamma, rstd)
    assert_close([y.detach() for y in backward], list(gradients))
    out, _, total = torch_npu.npu_add_rms_norm(x, other, gamma, 1e-3)
    assert_close(total, x + other)
    assert_close(out, torch.nn.functional.rms_norm(x + other, (8,), gamma, eps=1e-3))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str) -> None:
    """A turn by an angle, which a complex product is too."""
    x, angles = drawn(2, 3, 4, 8), torch.rand(1, 3, 1, 4).double()
    pairs = x.unflatten(-1, (2, 4)).mT if mode == "half" else x.unflatten(-1, (4, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    ))  # fmt: skip
    expected = (turned.mT if mode == "half" else turned).flatten(-2)
    wide = torch.cat((angles, angles), -1) if mode == "half" else angles.repeat_interleave(2, -1)
    r1, r2 = (y.requires_grad_() for y in (wide.cos(), wide.sin()))
    out = torch_npu.npu_rotary_mul(x, r1, r2, mode)
    assert_close(out, expected)
    gradients = torch.autograd.grad(out.square().sum(), [x, r1, r2])
    assert_close(gradients[0], torch.autograd.grad(expected.square().sum(), x)[0])
    backward = torch_npu.npu_rotary_mul_backward(2 * out, x, r1, r2, mode)
    assert_close([y.detach() for y in backward], list(gradients))


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim: int) -> None:
    x = drawn(2, 6, 8)
    gate, value = x.chunk(2, dim)
    expected = gate * gate.sigmoid() * value
    out = torch_npu.npu_swiglu(x, dim)
    assert_close(out, expected)
    gradient = torch.autograd.grad(expected.square().sum(), x)[0]
    assert_close(torch.autograd.grad(out.square().sum(), x)[0], gradient)
    assert_close(torch_npu.npu_swiglu_backward(2 * out, x, dim).detach(), gradient)
