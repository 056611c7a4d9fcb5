"""FlashAttention-3's functions, by their own names and signatures, over the operators.

``from ascend_attn_ops.flash_attn.flash_attn_3 import flash_attn_func`` takes the place of
``from flash_attn_interface import flash_attn_func``. They are documented in
`ascend_attn_ops.flash_attn`. `num_splits`, `pack_gqa`, `sm_margin` and the largest lengths guide a
launch there and have no effect here. `qv`, descaling factors, `attention_chunk` and `softcap` raise
NotImplementedError. Sinks are an addition of vLLM's version (`s_aux`) and of FlashAttention-4
(`learnable_sink`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_count, check_tensor, wrong
from ascend_attn_ops.flash_attn import _conventions as conventions
from ascend_attn_ops.flash_attn import flash_attn_interface as flash_attn
from ascend_attn_ops.flash_attn._cache import attend_with_cache
from ascend_attn_ops.flash_attn._passes import backward_pass, forward_pass

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]

Attention = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Attention:
    """:func:`ascend_attn_ops.flash_attn.flash_attn_func` with FlashAttention-3's signature.

    Returns:
        out, or with return_attn_probs (out, softmax_lse).
    """
    conventions.refuse_given(
        "flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    result = flash_attn.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic,
        return_attn_probs, s_aux=s_aux, learnable_sink=learnable_sink,
    )  # fmt: skip
    return result if isinstance(result, Tensor) else result[:2]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> Attention:
    """:func:`ascend_attn_ops.flash_attn.flash_attn_varlen_func` with FlashAttention-3's signature.

    Args:
        seqused_q: int32 (batch_size,), how many of its first queries each sequence uses; None for
            all. Unused queries see no key.
        seqused_k: as seqused_q, of k.

    Returns:
        out, or with return_attn_probs (out, softmax_lse).
    """
    conventions.refuse_given(
        "flash_attn_varlen_func", qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    result, lse = flash_attn.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, deterministic, out, causal,
        window_size, softmax_scale, softcap, None, 0.0, return_attn_probs, (s_aux, learnable_sink),
    )  # fmt: skip
    return result if lse is None else (result, lse)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Attention:
    """:func:`flash_attn_func` of query, key and value in one tensor.

    Args:
        qkv: (batch_size, seqlen, 3, nheads, headdim); or with num_heads_q (batch_size, seqlen,
            num_heads_q + 2 * nheads_k, headdim), the heads of query, key and value.
        num_heads_q: the heads of query, of a qkv with 4 axes.
    """
    name = "flash_attn_qkvpacked_func"
    check_tensor(name, "qkv", qkv)
    if qkv.dim() == 4:
        heads = check_count(name, "num_heads_q", num_heads_q, most=qkv.shape[2])
        key_heads, rest = divmod(qkv.shape[2] - heads, 2)
        if rest:
            expected = f"num_heads_q + 2 * nheads_k heads with num_heads_q = {heads}"
            raise wrong(ValueError, name, "qkv", expected, str(list(qkv.shape)))
        q, k, v = qkv.split([heads, key_heads, key_heads], 2)
    else:
        q, k, v = flash_attn.parts_of(name, "qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """:func:`ascend_attn_ops.flash_attn.flash_attn_with_kvcache` with FlashAttention-3's signature.

    Args:
        page_table: the block_table there.
        cu_seqlens_q: int32 (batch_size + 1,): q and out then are packed, (total_q, nheads,
            headdim), and softmax_lse is (nheads, total_q).
        cu_seqlens_k_new, rotary_seqlens, scheduler_metadata: only None.

    Returns:
        out, or with return_softmax_lse (out, softmax_lse) and two empty tensors, for results of
        splits.
    """
    conventions.refuse_given(
        "flash_attn_with_kvcache", qv=qv, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk, scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    out, lse = attend_with_cache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, softmax_scale, causal, window_size, softcap, None,
        return_softmax_lse, (s_aux, learnable_sink), cu_seqlens_q,
    )  # fmt: skip
    return out if lse is None else (out, lse, q.new_empty(0), q.new_empty(0))


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The forward pass of `flash_attn_func`, or with cu_seqlens_q of `flash_attn_varlen_func`: out,
    softmax_lse, (batch_size, nheads, seqlen_q) or (nheads, total_q), and two empty tensors."""
    name = "_flash_attn_forward"
    conventions.refuse_given(
        name, k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    lengths = None
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    else:
        conventions.refuse_given(
            name, seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table
        )
    out, lse = forward_pass(
        name, (q, k, v), lengths, page_table, causal, window_size_left, window_size_right,
        softmax_scale, softcap,
    )  # fmt: skip
    if out_ is not None:
        out = out_.copy_(out)
    return out, lse, out.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Write the gradients of `_flash_attn_forward` to dq, dk and dv.

    If k and v are a part of the keys, out and softmax_lse may belong to all keys. Returns an empty
    tensor, because the row sums of dout * out are not kept.
    """
    name = "_flash_attn_backward"
    lengths = None
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k
    else:
        conventions.refuse_given(name, sequed_q=sequed_q, sequed_k=sequed_k)
    backward_pass(
        name, (dout, q, k, v, out), softmax_lse, (dq, dk, dv), lengths, deterministic, is_causal,
        window_size_left, window_size_right, softmax_scale, softcap,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.float32, device=q.device)
