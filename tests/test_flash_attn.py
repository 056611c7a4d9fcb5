"""flash-attn's functions against what it documents, written with torch's own attention.

Exact where the numbers may be: in float64, of which the operators' CPU kernels are capable.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from ascend_attn_ops import flash_attn
from ascend_attn_ops.flash_attn import flash_attn_3, flash_attn_func, flash_attn_varlen_func
from support.attention import attention
from support.flash_attention_in_torch import (
    assert_as_stated,
    assert_gradients,
    attend,
    attend_packed,
    cu,
    in_blocks,
    packed,
    visible,
)
from torch import Tensor

no_limits = pytest.mark.usefixtures("no_limits")

B, N, NK, D = 2, 4, 2, 24
MASKS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (5, 0)},
    {"window_size": (0, 0)}, {"window_size": (-1, 4)}, {"window_size": (2, -1)},
    {"window_size": (4, 9), "causal": True},
]  # fmt: skip
SIZES = [(12, 12), (7, 13), (13, 5), (1, 33), (33, 1)]

each_mask = pytest.mark.parametrize("mask", MASKS, ids=str)
each_size = pytest.mark.parametrize(("sq", "skv"), SIZES)
# FlashAttention-3's functions too; vLLM's name of a sink, and FlashAttention-4's.
SINKS = [*product((flash_attn, flash_attn_3), (None, "s_aux", "learnable_sink"))]
each_sink = pytest.mark.parametrize(("module", "name"), SINKS)


def qkv(
    sq: int, skv: int, key_heads: int = N, dtype: torch.dtype = torch.float64, value_size: int = D
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sq * 100 + skv)
    shapes = (B, sq, N, D), (B, skv, key_heads, D), (B, skv, key_heads, value_size)
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def with_sink(tensors: list[Tensor], name: str | None) -> dict[str | None, Tensor]:
    """Adds a sink to the tensors: an argument of this name."""
    if name is None:
        return {}
    tensors.append(torch.linspace(-1, 2, N, dtype=torch.float64).requires_grad_())
    return {name: tensors[-1]}


def slopes_of(rows: tuple[int, ...]) -> Tensor:
    return torch.rand(*rows, N, generator=torch.Generator().manual_seed(1)) / 2 + 0.05


def assert_within_the_specification(
    out: Tensor, exact: Tensor, q: Tensor, k: Tensor, v: Tensor, **mask: Any
) -> None:
    """docs/numerics.md: by the size of what was summed."""
    c = {torch.float16: 2**-9, torch.bfloat16: 2**-7, torch.float32: 1e-5}[out.dtype]
    summed, _ = attend(q, k, v.abs(), **mask)
    ulp = torch.finfo(out.dtype).eps * 2.0 ** (torch.frexp(exact).exponent - 1)
    assert ((out.double() - exact).abs() <= c * summed + ulp / 2).all()


@no_limits
@pytest.mark.parametrize("key_heads", [N, 2, 1])
@each_size
@each_mask
@each_sink
def test_masks_sizes_and_gradients(
    module: Any, name: str | None, mask: dict[str, Any], sq: int, skv: int, key_heads: int
) -> None:
    """Queries before the first key of the diagonal see the sink alone."""
    tensors = [x.requires_grad_() for x in qkv(sq, skv, key_heads)]
    sinks = with_sink(tensors, name)
    q, k, v = tensors[:3]
    actual = module.flash_attn_func(q, k, v, **mask, return_attn_probs=True, **sinks)
    assert_as_stated(actual, attend(q, k, v, **mask, s_aux=sinks.get(name)), tensors)


def test_causal_is_aligned_to_the_bottom_right() -> None:
    """The two drawings of flash-attn's README, by what is not seen."""
    assert visible(2, 5, True, (-1, -1)).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    drawn = [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert visible(5, 2, True, (-1, -1)).int().tolist() == drawn


@no_limits
def test_scale_and_a_smaller_value() -> None:
    tensors = [x.requires_grad_() for x in qkv(9, 14, 2, value_size=8)]
    for scale in (0.3, 1, None):
        out = flash_attn_func(*tensors, softmax_scale=scale, causal=True)
        assert_gradients(out, attend(*tensors, softmax_scale=scale, causal=True)[0], tensors)


@no_limits
@pytest.mark.parametrize("rows", [(), (B,)], ids=["of heads", "of batches"])
@each_size
@pytest.mark.parametrize("mask", [*MASKS[:3], {"window_size": (4, 0)}], ids=str)
@pytest.mark.parametrize("name", [None, "s_aux"])
def test_alibi(
    name: str | None, mask: dict[str, Any], sq: int, skv: int, rows: tuple[int, ...]
) -> None:
    tensors = [x.requires_grad_() for x in qkv(sq, skv, 2)]
    sinks, slopes = with_sink(tensors, name), slopes_of(rows)
    q, k, v = tensors[:3]
    actual = flash_attn_func(q, k, v, **mask, alibi_slopes=slopes, return_attn_probs=True, **sinks)
    expected = attend(q, k, v, **mask, alibi_slopes=slopes, s_aux=sinks.get(name))
    assert_as_stated(actual, expected, tensors)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 4), (4, 0)], ids=str)
def test_empty(sizes: tuple[int, int]) -> None:
    q, k, v = qkv(*sizes, dtype=torch.bfloat16)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((B, N, sizes[0]), torch.inf))


# Sequences: empty ones, more keys than queries, and the reverse.
PACKS = [
    ([0, 5, 12], [0, 5, 12]), ([0, 5, 5, 12, 13], [0, 9, 12, 12, 40]), ([0, 30], [0, 3]),
    ([0, 0, 7], [0, 4, 11]), ([0, 0], [0, 0]),
]  # fmt: skip


@no_limits
@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize(("cu_q", "cu_k"), PACKS, ids=str)
@each_mask
@each_sink
def test_packed_sequences(
    module: Any, name: str | None, mask: dict[str, Any], cu_q: list[int], cu_k: list[int],
    behind: int,
) -> None:  # fmt: skip
    tensors = [x.requires_grad_() for x in packed(cu_q, cu_k, 2, behind=behind)]
    sinks = with_sink(tensors, name)
    q, k, v = tensors[:3]
    actual = module.flash_attn_varlen_func(
        q, k, v, cu(cu_q), cu(cu_k), 30, 40, **mask, return_attn_probs=True, **sinks
    )
    expected = attend_packed(q, k, v, cu_q, cu_k, **mask, s_aux=sinks.get(name))
    assert_as_stated(actual, expected, tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (1, 0)}], ids=str)
def test_packed_sequences_under_the_limits(mask: dict[str, Any], dtype: torch.dtype) -> None:
    """With tokens behind the last sequence, which the device wants to be told of."""
    cu_q, cu_k = PACKS[1]
    leaves = [x.requires_grad_() for x in packed(cu_q, cu_k, 2, dtype, behind=3)]
    out, lse, _ = flash_attn_varlen_func(
        *leaves, cu(cu_q), cu(cu_k), 7, 28, **mask, return_attn_probs=True
    )
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        q, k, v = leaves[0][None, a:b], leaves[1][None, c:d], leaves[2][None, c:d]
        expected, _ = attend(q, k, v, **mask)
        assert_within_the_specification(out[None, a:b], expected, q, k, v, **mask)
    out.sum().backward()
    assert all(x.grad is not None and not x.grad[-3:].any() for x in leaves)


@no_limits
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("cu_q", "cu_k"), PACKS[:3], ids=str)
def test_gradient_of_the_log_sum_exp(cu_q: list[int], cu_k: list[int], compiled: bool) -> None:
    """As merging the attention of several parts of the keys needs it."""
    leaves = [x.requires_grad_() for x in (*packed(cu_q, cu_k, 2, behind=2), torch.randn(N))]

    def merged(*x: Tensor) -> Tensor:
        q, k, v, sink = x
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, cu(cu_q), cu(cu_k), 30, 40, causal=True, return_attn_probs=True, s_aux=sink
        )
        return out.sum() + lse[:, : cu_q[-1]].exp().sqrt().sum()

    q, k, v, sink = leaves
    expected: Tensor | float = 0.0
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        parts = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
        out, lse = attention(*parts, visible(b - a, d - c, True, (-1, -1)), D**-0.5, sink=sink)
        expected = expected + out.sum() + lse.exp().sqrt().sum()
    call = torch.compile(merged, backend="aot_eager", fullgraph=True) if compiled else merged
    found, wanted = (torch.autograd.grad(x, leaves) for x in (call(*leaves), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@no_limits
@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("rows", [(), (3,)], ids=["of heads", "of sequences"])
@pytest.mark.parametrize(
    ("cu_k", "mask"),
    [
        ([0, 5, 5, 11], {}), ([0, 8, 9, 18], {}), ([0, 3, 9, 13], {}),
        ([0, 9, 9, 20], {"causal": True}), ([0, 3, 9, 33], {"causal": True}),
        ([0, 3, 9, 33], {"window_size": (4, 0)}), ([0, 3, 9, 33], {"window_size": (0, 0)}),
    ],
    ids=str,
)  # fmt: skip
def test_packed_alibi(
    cu_k: list[int], mask: dict[str, Any], rows: tuple[int, ...], behind: int
) -> None:
    """The distance counts from the bottom right corner of each sequence."""
    cu_q = [0, 5, 5, 11]
    tensors = [x.requires_grad_() for x in packed(cu_q, cu_k, 2, behind=behind)]
    slopes = slopes_of(rows)
    actual = flash_attn_varlen_func(
        *tensors, cu(cu_q), cu(cu_k), 6, 24, **mask, alibi_slopes=slopes, return_attn_probs=True
    )
    expected = attend_packed(*tensors, cu_q, cu_k, **mask, alibi_slopes=slopes)
    assert_as_stated(actual, expected, tensors)


@no_limits
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("rows", [None, (), (3,)], ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, D), (torch.float16, 64)], ids=str)
def test_packed_keys_in_blocks(
    block_size: int, rows: tuple[int, ...] | None, dtype: torch.dtype, size: int
) -> None:
    """In half precision, blocks of 16 are read where they are."""
    cu_q, cu_k = [0, 5, 5, 11], [0, 9, 10, 22]
    q, k, v = packed(cu_q, cu_k, 2, dtype, behind=2, size=size)
    blocks = (in_blocks(x[:22].split([9, 1, 12]), block_size) for x in (k, v))
    (k_blocks, table), (v_blocks, _) = blocks
    options: dict[str, Any] = {"causal": True}
    options |= {"s_aux": torch.ones(N)} if rows is None else {"alibi_slopes": slopes_of(rows)}
    out, lse, _ = flash_attn_varlen_func(
        q, k_blocks, v_blocks, cu(cu_q), cu(cu_k), 6, 12, block_table=table,
        return_attn_probs=True, **options,
    )  # fmt: skip
    expected, expected_lse = attend_packed(q, k, v, cu_q, cu_k, **options)
    tolerance = None if dtype == torch.float64 else 2e-3
    actual = out.double(), lse.double()
    torch.testing.assert_close(actual, (expected, expected_lse), rtol=tolerance, atol=tolerance)


@no_limits
def test_compiles() -> None:
    q, k, v = qkv(16, 16, dtype=torch.float32)
    options: dict[str, Any] = {"causal": True, "s_aux": torch.randn(N), "return_attn_probs": True}
    function = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, function(q, k, v, **options), flash_attn_func(q, k, v, **options)))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = [0, 10, 32]

    def of_lists(*x: Tensor) -> Any:
        return flash_attn_varlen_func(*x, lengths, tuple(lengths), 22, 22, causal=True)

    compiled = torch.compile(of_lists, backend="aot_eager", fullgraph=True)(*flat)
    assert torch.equal(compiled, of_lists(*flat))
    written = torch.empty_like(flat[0])
    with_tensors = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([0, 10, 32], [0, 0, 31]):
            call = (*flat, cu(lengths), cu(lengths), 22, 22)
            out = with_tensors(*call, causal=True, out=written)
            assert out.data_ptr() == written.data_ptr()
            assert torch.equal(out, flash_attn_varlen_func(*call, causal=True))


# Sinks alone.


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@no_limits
def test_rows_without_keys() -> None:
    """The log-sum-exp of a row is its sink; rows behind the last sequence belong to none."""
    q, k, sink = randn(6, N, D), randn(3, NK, D), randn(N)
    out, lse, _ = flash_attn_varlen_func(
        q, k, k, cu([0, 4, 4]), cu([0, 0, 3]), 4, 3, s_aux=sink, return_attn_probs=True
    )
    assert not out.any()
    assert torch.equal(lse[:, :4], sink[:, None].expand(N, 4))
    assert (lse[:, 4:] == torch.inf).all()
    no_keys = k[None, :0]
    for own in (sink, torch.full((N,), -torch.inf)):
        out, lse, _ = flash_attn_func(q[None], no_keys, no_keys, s_aux=own, return_attn_probs=True)
        expected = torch.where(own == -torch.inf, torch.inf, own.double())
        assert not out.any()
        assert torch.equal(lse[0], expected[:, None].expand(N, 6))


@no_limits
def test_slopes_of_packs_that_would_move_the_scores_against_the_sink() -> None:
    q, k, sink = randn(13, N, D), randn(40, NK, D), randn(N)
    call = (q, k, k, cu(PACKS[1][0]), cu(PACKS[1][1]), 7, 28)
    options = {"causal": True, "alibi_slopes": torch.rand(N) + 0.1}
    assert flash_attn_varlen_func(*call, **options).shape == q.shape
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: expected beside a sink one seq"):
        flash_attn_varlen_func(*call, **options, s_aux=sink)


@no_limits
def test_half_precision_and_autocast() -> None:
    """The sink is not rounded to the dtype of the others."""
    q, k, v = (randn(B, 9, n, D, seed=n).bfloat16() for n in (N, NK, NK))
    sink = torch.full((N,), 1.00390625 + 2**-20)
    out = flash_attn_func(q, k, v, s_aux=sink)
    with torch.autocast("cpu", torch.bfloat16):
        again = flash_attn_func(q.float(), k.float(), v.float(), learnable_sink=sink)
    assert torch.equal(again, out)
    half = sink.bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(flash_attn_func(q, k, v, s_aux=half).float().sum(), half)
    assert gradient.dtype == torch.bfloat16


@no_limits
def test_a_cache_gives_no_gradient_to_a_sink() -> None:
    sink = torch.zeros(N, requires_grad=True)
    q, cache = randn(B, 1, N, D), randn(B, 8, NK, D)
    with pytest.raises(NotImplementedError, match=r"s_aux: expected no gradient .*torch\.no_grad"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, s_aux=sink)
    with torch.no_grad():
        flash_attn.flash_attn_with_kvcache(q, cache, cache, s_aux=sink)
