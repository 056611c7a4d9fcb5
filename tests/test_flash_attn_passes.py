"""flash-attn's packed functions, its passes without autograd, and FlashAttention-3's functions."""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from ascend_attn_ops import flash_attn
from ascend_attn_ops.flash_attn import flash_attn_3
from support.flash_attention_in_torch import (
    assert_as_stated,
    assert_gradients,
    attend,
    attend_packed,
    cu,
    in_blocks,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, KV, D = 2, 4, 2, 24
CU_Q, CU_K = [0, 5, 5, 12, 13], [0, 9, 12, 12, 40]
MASKS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (0, 0)},
]  # fmt: skip
each_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


def randn(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=requires_grad)


def qkv_of(packed: bool, queries: int = 5, keys: int = 9) -> list[Tensor]:
    q, k = ((CU_Q[-1],), (CU_K[-1],)) if packed else ((B, queries), (B, keys))
    return [randn(*q, N, D), randn(*k, KV, D), randn(*k, KV, D)]


@each_mask
@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_query_key_and_value_in_one_tensor(module: Any, mask: dict[str, Any]) -> None:
    qkv = randn(B, 7, 3, N, D)
    actual = module.flash_attn_qkvpacked_func(qkv, **mask, return_attn_probs=True)
    assert_as_stated(actual, attend(*qkv.unbind(2), **mask), [qkv])


def test_fewer_heads_of_keys_in_one_tensor() -> None:
    qkv = randn(B, 7, N + 2 * KV, D)
    out = flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=N)
    expected, _ = attend(*qkv.split([N, KV, KV], 2), causal=True)
    assert_gradients(out, expected, [qkv])


@each_mask
def test_key_and_value_in_one_tensor(mask: dict[str, Any]) -> None:
    q, kv = randn(B, 5, N, D), randn(B, 9, 2, KV, D)
    out = flash_attn.flash_attn_kvpacked_func(q, kv, **mask)
    assert_gradients(out, attend(q, *kv.unbind(2), **mask)[0], [q, kv])
    q, kv = randn(CU_Q[-1], N, D), randn(CU_K[-1], 2, KV, D)
    actual = flash_attn.flash_attn_varlen_kvpacked_func(
        q, kv, cu(CU_Q), cu(CU_K), 7, 28, **mask, return_attn_probs=True
    )
    assert_as_stated(actual, attend_packed(q, *kv.unbind(1), CU_Q, CU_K, **mask), [q, kv])


@each_mask
def test_packed_sequences_in_one_tensor(mask: dict[str, Any]) -> None:
    qkv = randn(CU_Q[-1], 3, N, D)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu(CU_Q), 7, **mask)
    assert_gradients(out, attend_packed(*qkv.unbind(1), CU_Q, CU_Q, **mask)[0], [qkv])


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("flash_attn_qkvpacked_func", (torch.ones(2, 3, 2, 4, 8),), r"qkv: .*seqlen, 3, nheads"),
        ("flash_attn_kvpacked_func", (torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 8)),
         r"kv: .*seqlen, 2, nheads_k"),
        ("flash_attn_varlen_qkvpacked_func", (torch.ones(3, 2, 4, 8), [0, 3], 3),
         r"qkv: .*total, 3"),
    ],
)  # fmt: skip
def test_wrong_shapes(function: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"{function}: {message}"):
        getattr(flash_attn, function)(*arguments)


def bounds(mask: dict[str, Any]) -> tuple[bool, int, int]:
    return mask.get("causal", False), *mask.get("window_size", (-1, -1))


@each_mask
@pytest.mark.parametrize("slopes", [None, (N,), (B, N)], ids=str)
@pytest.mark.parametrize("sizes", [(7, 7), (5, 9), (9, 5)], ids=str)
def test_passes(
    mask: dict[str, Any], slopes: tuple[int, ...] | None, sizes: tuple[int, int]
) -> None:
    alibi = None if slopes is None else 1 / torch.arange(1.0, 1 + torch.Size(slopes).numel())
    alibi = alibi if alibi is None or slopes is None else alibi.view(slopes)
    q, k, v = qkv_of(False, *sizes)
    options = (0.0, 0.3, *bounds(mask), 0.0, alibi)
    expected = attend(q, k, v, softmax_scale=0.3, alibi_slopes=alibi, **mask)
    check_passes("_flash_attn", [q, k, v], options, expected)


def check_passes(
    name: str, tensors: list[Tensor], options: tuple[Any, ...], expected: tuple[Tensor, Tensor]
) -> None:
    out, lse, _, state = getattr(flash_attn, f"{name}_forward")(*tensors, *options, False)
    torch.testing.assert_close(out, expected[0].detach())
    torch.testing.assert_close(lse, expected[1])
    assert not any(x.requires_grad for x in (out, lse))
    d_out = torch.randn_like(out)
    found = [torch.full_like(x, torch.nan, requires_grad=False) for x in tensors]
    backward = getattr(flash_attn, f"{name}_backward")
    backward(d_out, *tensors, out, lse, *found, *options, False, state)
    torch.testing.assert_close(tuple(found), torch.autograd.grad(expected[0], tensors, d_out))


# Where keys come after the diagonal, slopes want the same seqlen_k - seqlen_q everywhere.
@pytest.mark.parametrize(
    ("mask", "with_slopes"), [*((x, False) for x in MASKS), (MASKS[1], True), (MASKS[3], True)],
    ids=str,
)  # fmt: skip
def test_packed_passes(mask: dict[str, Any], with_slopes: bool) -> None:
    alibi = 1 / torch.arange(1.0, 1 + N) if with_slopes else None
    q, k, v = qkv_of(True)
    options = (cu(CU_Q), cu(CU_K), 7, 28, 0.0, None, *bounds(mask), 0.0, alibi)
    expected = attend_packed(q, k, v, CU_Q, CU_K, alibi_slopes=alibi, **mask)
    check_passes("_flash_attn_varlen", [q, k, v], options, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_of_two_parts_of_the_keys(packed: bool) -> None:
    """As ring attention merges: forwards of parts, then backwards with the statistics of all."""
    q, k, v = randn(6, N, D), randn(8, KV, D), randn(8, KV, D)
    name = "_flash_attn_varlen" if packed else "_flash_attn"
    forward = getattr(flash_attn, f"{name}_forward")
    backward = getattr(flash_attn, f"{name}_backward")
    lengths: tuple[Any, ...] = (cu([0, 6]), cu([0, 4]), 6, 4) if packed else ()
    options = (*lengths, 0.0, None, False, -1, -1, 0.0, None, False)

    def given(*x: Tensor) -> list[Tensor]:
        return [y.detach() if packed else y.detach()[None] for y in x]

    parts = [given(q, *x) for x in zip(k.split(4), v.split(4), strict=True)]
    outs, lses = zip(*(forward(*x, *options)[:2] for x in parts), strict=True)
    lse = torch.logaddexp(*lses)
    # lse has the heads first, out the tokens.
    shares = [(x - lse).exp().transpose(-1, -2)[..., None] for x in lses]
    out = sum(share * x for share, x in zip(shares, outs, strict=True))
    expected, expected_lse = attend_packed(q, k, v, [0, 6], [0, 8])
    d_out = torch.randn_like(expected)
    torch.testing.assert_close([out, lse], given(expected, expected_lse))
    gradients = []
    for x in parts:
        found = [torch.empty_like(y) for y in x]
        backward(*given(d_out), *x, out, lse, *found, *options)
        gradients.append([y.view(-1, *y.shape[-2:]) for y in found])
    d_q, d_k, d_v = zip(*gradients, strict=True)
    wanted = torch.autograd.grad(expected, (q, k, v), d_out)
    torch.testing.assert_close((sum(d_q), torch.cat(d_k), torch.cat(d_v)), wanted)


def test_no_dropout_in_a_pass() -> None:
    q = randn(B, 5, N, D, requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"_flash_attn_forward: dropout_p: expected"):
        flash_attn._flash_attn_forward(q, q, q, 0.1, None, False, -1, -1, 0.0, None, False)


@each_mask
@pytest.mark.parametrize("packed", [False, True])
def test_passes_of_flash_attention_3(packed: bool, mask: dict[str, Any]) -> None:
    causal, left, right = bounds(mask)
    options: dict[str, Any] = {"window_size_left": left, "window_size_right": right}
    q, k, v = qkv_of(packed)
    if packed:
        options |= {"cu_seqlens_q": cu(CU_Q), "cu_seqlens_k": cu(CU_K)}
        expected, expected_lse = attend_packed(q, k, v, CU_Q, CU_K, **mask)
    else:
        expected, expected_lse = attend(q, k, v, **mask)
    target = torch.empty_like(q) if packed else None
    out, lse, *_ = flash_attn_3._flash_attn_forward(q, k, v, out_=target, causal=causal, **options)
    assert target is None or out is target
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, expected_lse)
    d_out = torch.randn_like(out)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    flash_attn_3._flash_attn_backward(
        d_out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=causal, **options
    )
    torch.testing.assert_close((dq, dk, dv), torch.autograd.grad(expected, (q, k, v), d_out))


@each_mask
def test_functions_of_flash_attention_3(mask: dict[str, Any]) -> None:
    assert isinstance(flash_attn_3.flash_attn_func(*qkv_of(False), None, **mask), Tensor)
    q, k, v = qkv_of(True)
    used_q, used_k, sink = [5, 0, 4, 1], [4, 3, 0, 28], randn(N)
    for used in ({"seqused_k": used_k}, {"seqused_q": used_q, "seqused_k": used_k}):
        (kept_q, cu_q), (kept_k, cu_k) = (
            kept(starts, used.get(name))
            for starts, name in ((CU_Q, "seqused_q"), (CU_K, "seqused_k"))
        )
        out, lse = flash_attn_3.flash_attn_varlen_func(
            q, k, v, cu(CU_Q), cu(CU_K), 7, 28, **{name: cu(x) for name, x in used.items()},
            **mask, s_aux=sink, return_attn_probs=True,
        )  # fmt: skip
        expected, expected_lse = attend_packed(
            q[kept_q], k[kept_k], v[kept_k], cu_q, cu_k, **mask, s_aux=sink
        )
        assert_gradients(out[kept_q], expected, [q, k, v, sink])
        torch.testing.assert_close(lse[:, kept_q], expected_lse)
        assert out.count_nonzero() == out[kept_q].count_nonzero()


def kept(starts: list[int], used: list[int] | None) -> tuple[Tensor, list[int]]:
    """The tokens that are used, and the cumulative lengths of these alone."""
    lengths = [b - a for a, b in pairwise(starts)] if used is None else used
    tokens = [torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]
    return torch.cat(tokens), [0, *accumulate(lengths)]


@pytest.mark.parametrize("packed", [False, True])
def test_cache_of_flash_attention_3(packed: bool) -> None:
    q, sink = randn(B, 1, N, D, requires_grad=False), randn(N, requires_grad=False)
    k, v = randn(2, 16, KV, D, requires_grad=False)
    (k_pages, table), (v_pages, _) = (in_blocks(x.split([5, 11]), 4) for x in (k, v))
    parts = zip(q.split(1), k.split([5, 11]), v.split([5, 11]), strict=True)
    expected = [attend(x, y[None], z[None], s_aux=sink) for x, y, z in parts]
    out, lse, *_ = flash_attn_3.flash_attn_with_kvcache(
        q[:, 0] if packed else q, k_pages, v_pages, cache_seqlens=cu([5, 11]), page_table=table,
        causal=True, return_softmax_lse=True, learnable_sink=sink,
        cu_seqlens_q=cu([0, 1, 2]) if packed else None,
    )  # fmt: skip
    if packed:
        out, lse = out[:, None], lse.T[..., None]
    torch.testing.assert_close(out, torch.cat([x for x, _ in expected]))
    torch.testing.assert_close(lse, torch.cat([x for _, x in expected]))


@pytest.mark.parametrize("argument", ["qv", "q_descale", "attention_chunk", "softcap"])
def test_what_no_operator_does(argument: str) -> None:
    x = torch.ones(B, 5, N, D)
    value: Any = 1 if argument in ("attention_chunk", "softcap") else x
    with pytest.raises(NotImplementedError, match=f"flash_attn_func: {argument}: expected"):
        flash_attn_3.flash_attn_func(x, x, x, **{argument: value})


# Names in order, as flash-attn 2.8 and FlashAttention-3 have them.
PACKED = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic \
return_attn_probs"
PASS = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
SEQUENCES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
DESCALE = "q_descale k_descale v_descale"
# The names of sinks in vLLM's FlashAttention-3 and in FlashAttention-4.
SINK = "s_aux learnable_sink"
SIGNATURES = {
    (flash_attn, "flash_attn_func"): f"q k v {PACKED} {SINK}",
    (flash_attn, "flash_attn_varlen_func"): f"q k v {SEQUENCES} {PACKED} block_table {SINK} out",
    (flash_attn, "flash_attn_with_kvcache"): f"q k_cache v_cache k v rotary_cos rotary_sin \
cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap \
rotary_interleaved alibi_slopes num_splits return_softmax_lse {SINK}",
    (flash_attn, "flash_attn_qkvpacked_func"): f"qkv {PACKED}",
    (flash_attn, "flash_attn_kvpacked_func"): f"q kv {PACKED}",
    (flash_attn, "flash_attn_varlen_qkvpacked_func"): f"qkv cu_seqlens max_seqlen {PACKED}",
    (flash_attn, "flash_attn_varlen_kvpacked_func"): f"q kv {SEQUENCES} {PACKED}",
    (flash_attn, "_flash_attn_forward"): f"q k v {PASS} return_softmax",
    (flash_attn, "_flash_attn_varlen_forward"): f"q k v {SEQUENCES} {PASS} return_softmax \
block_table leftpad_k seqused_k zero_tensors num_splits",
    (flash_attn, "_flash_attn_backward"): f"dout q k v out softmax_lse dq dk dv {PASS} \
deterministic rng_state",
    (flash_attn, "_flash_attn_varlen_backward"): f"dout q k v out softmax_lse dq dk dv {SEQUENCES} \
{PASS} deterministic rng_state zero_tensors",
    (flash_attn_3, "flash_attn_func"): f"q k v softmax_scale causal qv {DESCALE} \
window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin \
return_attn_probs {SINK}",
    (flash_attn_3, "flash_attn_varlen_func"): f"q k v {SEQUENCES} seqused_q seqused_k \
softmax_scale causal qv {DESCALE} window_size attention_chunk softcap num_splits pack_gqa \
deterministic sm_margin return_attn_probs {SINK} out",
    (flash_attn_3, "flash_attn_qkvpacked_func"): f"qkv softmax_scale causal {DESCALE} \
window_size attention_chunk softcap deterministic num_heads_q sm_margin return_attn_probs",
    (flash_attn_3, "flash_attn_with_kvcache"): f"q k_cache v_cache k v qv rotary_cos \
rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new \
max_seqlen_q rotary_seqlens {DESCALE} softmax_scale causal window_size attention_chunk softcap \
rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse {SINK}",
    (flash_attn_3, "_flash_attn_forward"): f"q k v k_new v_new qv out_ cu_seqlens_q \
cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k page_table \
kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary {DESCALE} softmax_scale causal \
window_size_left window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata \
num_splits pack_gqa sm_margin",
    (flash_attn_3, "_flash_attn_backward"): "dout q k v out softmax_lse cu_seqlens_q \
cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale is_causal \
window_size_left window_size_right softcap deterministic sm_margin",
}


DEFAULTS = {
    "dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "deterministic": False, "return_attn_probs": False, "rotary_interleaved": True,
    "num_splits": 0, "return_softmax_lse": False,
    **dict.fromkeys(["softmax_scale", "alibi_slopes", "block_table", "k", "v", "rotary_cos",
                     "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "s_aux",
                     "learnable_sink", "out"]),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x))
def test_signatures(module: Any, name: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters
    assert list(parameters) == SIGNATURES[module, name].split()
    for argument, parameter in parameters.items():
        has_default = parameter.default is not parameter.empty
        if has_default and module is flash_attn and not name.startswith("_"):
            assert parameter.default == DEFAULTS[argument], argument
