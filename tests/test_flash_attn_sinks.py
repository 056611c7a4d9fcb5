"""Sinks in flash-attn's functions: vLLM's s_aux, and FlashAttention-4's learnable_sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_attn_ops import flash_attn, flash_attn_interface
from support.flash_attention_in_torch import attend, attend_packed
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


def cu(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_as_stated(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, Tensor], tensors: list[Tensor]
) -> None:
    torch.testing.assert_close(actual[:2], expected)
    assert not actual[1].requires_grad
    d_out = randn(*expected[0].shape, seed=9)
    torch.testing.assert_close(
        torch.autograd.grad(actual[0], tensors, d_out),
        torch.autograd.grad(expected[0], tensors, d_out),
    )


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


def test_keys_that_a_sequence_does_not_use() -> None:
    q, k, v, sink = leaves((13, N, D), (40, NK, D), (40, NK, D))
    used = [4, 3, 0, 28]
    actual = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, cu(CU_Q), cu(CU_K), 7, 28, seqused_k=cu(used), causal=True,
        return_attn_probs=True, s_aux=sink,
    )  # fmt: skip
    spans = zip(CU_K[:-1], used, strict=True)
    kept = torch.cat([torch.arange(begin, begin + count) for begin, count in spans])
    ends = [0, 4, 7, 7, 35]
    expected = attend_packed(q, k[kept], v[kept], CU_Q, ends, causal=True, s_aux=sink)
    assert_as_stated(actual, expected, [q, k, v, sink])


@each_name
@pytest.mark.parametrize("module", MODULES, ids=["2", "3"])
@pytest.mark.parametrize("lengths", [[7, 0, 20], [9, 9, 9]], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_caches(module: Any, name: str, lengths: list[int], paged: bool) -> None:
    slots, new = 24, 2
    q, sink = randn(3, new, N, D), randn(N)
    k, v = randn(3, new, NK, D, seed=1), randn(3, new, NK, D, seed=2)
    caches = [randn(3, slots, NK, D, seed=3), randn(3, slots, NK, D, seed=4)]
    whole = [
        [torch.cat((x[b, :n], y[b])) for b, n in enumerate(lengths)]
        for x, y in zip(caches, (k, v), strict=True)
    ]
    options: dict[str, Any] = {}
    if paged:
        caches = [x.reshape(3 * 4, slots // 4, NK, D) for x in caches]
        table = "block_table" if module is flash_attn else "page_table"
        options[table] = torch.arange(12, dtype=torch.int32).view(3, 4)
    out, lse, *_ = module.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=cu(lengths), causal=True, return_softmax_lse=True,
        **options, **{name: sink},
    )  # fmt: skip
    each = [
        attend(q[b, None], x[None], y[None], causal=True, s_aux=sink)
        for b, (x, y) in enumerate(zip(*whole, strict=True))
    ]
    expected, expected_lse = (torch.cat(x) for x in zip(*each, strict=True))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


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


def dense() -> dict[str, Tensor]:
    return {"q": randn(B, 3, N, D), "k": randn(B, 5, NK, D), "v": randn(B, 5, NK, D)}


def varlen() -> dict[str, Any]:
    lengths = {"cu_seqlens_q": cu([0, 3]), "cu_seqlens_k": cu([0, 5])}
    tensors = {"q": randn(3, N, D), "k": randn(5, NK, D), "v": randn(5, NK, D)}
    return {**tensors, **lengths, "max_seqlen_q": 3, "max_seqlen_k": 5}


def kvcache() -> dict[str, Any]:
    return {
        "q": randn(B, 1, N, D), "k_cache": randn(B, 8, NK, D), "v_cache": randn(B, 8, NK, D),
        "k": randn(B, 1, NK, D), "v": randn(B, 1, NK, D), "cache_seqlens": 3,
    }  # fmt: skip


FUNCTIONS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("flash_attn_func", dense), ("flash_attn_varlen_func", varlen),
    ("flash_attn_with_kvcache", kvcache),
]  # fmt: skip
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"s_aux": 3}, TypeError, "{name}: s_aux: expected a tensor or None, got int"),
    ({"learnable_sink": [0.0] * N}, TypeError, "{name}: learnable_sink: expected a tensor or None"),
    ({"s_aux": torch.zeros(N), "learnable_sink": torch.zeros(N)}, ValueError,
     "{name}: learnable_sink: expected None beside s_aux"),
    ({"s_aux": torch.zeros(NK)}, ValueError, r"sink: expected shape \(4\), one .*, got \[2\]"),
    ({"learnable_sink": torch.zeros(N).long()}, TypeError, "sink: expected dtype float64"),
    ({"s_aux": torch.zeros(N, device="meta")}, ValueError, r"(s_aux|sink): expected device cpu"),
]  # fmt: skip


@each_module
@pytest.mark.parametrize(("name", "arguments"), FUNCTIONS, ids=[x[0] for x in FUNCTIONS])
@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_sinks(
    module: Any,
    name: str,
    arguments: Callable[[], dict[str, Any]],
    change: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    given = arguments()
    caches = [given[x] for x in ("k_cache", "v_cache") if x in given]
    before = [x.clone() for x in caches]
    with pytest.raises(kind, match=message.replace("{name}", name)) as caught:
        getattr(module, name)(**given, **change)
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, caches, before))


def test_a_cache_gives_no_gradient_to_a_sink() -> None:
    sink = torch.zeros(N, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"s_aux: expected no gradient .*torch\.no_grad"):
        flash_attn.flash_attn_with_kvcache(**kvcache(), s_aux=sink)
    with torch.no_grad():
        flash_attn.flash_attn_with_kvcache(**kvcache(), s_aux=sink)


def test_compiles() -> None:
    q, k, v, sink = randn(B, 9, N, D), randn(B, 9, NK, D), randn(B, 9, NK, D), randn(N)
    function = torch.compile(
        lambda *x: flash_attn.flash_attn_func(*x[:3], causal=True, s_aux=x[3]),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    expected = flash_attn.flash_attn_func(q, k, v, causal=True, s_aux=sink)
    assert torch.equal(function(q, k, v, sink), expected)
