"""flash-attn's functions, by their own names and signatures, over the operators.

The names with an underscore are the passes that libraries of ring attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ascend_attn_ops._core.arguments import check_tensor, wrong
from ascend_attn_ops.flash_attn import _calls as calls
from ascend_attn_ops.flash_attn import _conventions as conventions
from ascend_attn_ops.flash_attn._cache import attend_with_cache
from ascend_attn_ops.flash_attn._passes import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of sequences that all have one length, with gradients.

    Query i sees key j where, with d = seqlen_k - seqlen_q::

        i + d - window_size[0] <= j <= i + d + window_size[1]

    The last query sees the last key. A row that sees no key is 0. Query head n reads key head
    n // (nheads / nheads_k).

    Args:
        q: (batch_size, seqlen_q, nheads, headdim); float16, bfloat16 or float32.
        k: (batch_size, seqlen_k, nheads_k, headdim), where nheads_k divides nheads.
        v: as k. Its headdim may be smaller, which flash-attn does not take.
        dropout_p: probability of dropping a weight; 0 in evaluation.
        softmax_scale: factor of the scores; None for 1 / sqrt(headdim).
        causal: no key after the diagonal, as window_size[1] = 0.
        window_size: (left, right); -1 bounds nothing.
        softcap: only 0: the operators have no cap of the scores.
        alibi_slopes: float32 (nheads,) or (batch_size, nheads). Adds -slope * abs(i + d - j) to the
            scaled score of query i and key j.
        deterministic: a deterministic backward, which an NPU has only under
            torch.use_deterministic_algorithms.
        return_attn_probs: return the log-sum-exp, too; not with dropout_p.
        s_aux: an attention sink of each query head, (nheads,), of any floating dtype.
        learnable_sink: s_aux by its name in FlashAttention-4.

    Returns:
        out, (batch_size, seqlen_q, nheads, headdim of v). With return_attn_probs (out, softmax_lse,
        S_dmask): softmax_lse is float32 (batch_size, nheads, seqlen_q), **+inf** in rows that see
        no key, and has a gradient, as merging several results needs; S_dmask is empty. With a sink,
        softmax_lse includes it, and is the sink in rows that see no key.

    Raises:
        NotImplementedError: softcap, and what is said above.
        TypeError, ValueError: an argument is wrong; also what
            :func:`ascend_attn_ops.flash_attention_score` raises, which is called with layout "BSND"
            ("TND" for slopes where seqlen_q and seqlen_k differ).

    Example:
        >>> import torch
        >>> from ascend_attn_ops.flash_attn import flash_attn_func
        >>> q = torch.zeros(2, 5, 8, 64, dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 9, 2, 64, dtype=torch.bfloat16)
        >>> out, softmax_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> softmax_lse[0, 0].exp().round().tolist()  # of scores of 0: how many keys a query sees
        [5.0, 6.0, 7.0, 8.0, 9.0]
    """
    name = "flash_attn_func"
    conventions.check_tensors(name, 4, "q k v", q, k, v)
    conventions.check_deterministic(name, q, deterministic)
    options = conventions.options_of(
        name, causal, window_size, softmax_scale, softcap, alibi_slopes, dropout_p,
        return_attn_probs, (s_aux, learnable_sink),
    )  # fmt: skip
    out, lse = calls.attend(options, q, k, v)
    return out if lse is None else (out, lse, q.new_empty(0))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of packed sequences, with gradients.

    A query sees the keys that it sees in :func:`flash_attn_func`, counted inside its sequence.
    Sequences may be empty. Tokens behind the last one belong to none: their rows are 0.

    CANN takes the lengths on the host: only a tensor on an NPU makes every call wait.

    Args:
        q: (total_q, nheads, headdim), the sequences one after another; float16, bfloat16 or
            float32.
        k: (total_k, nheads_k, headdim); with block_table the blocks of a cache, (num_blocks,
            block_size, nheads_k, headdim).
        v: as k. Its headdim may be smaller, which flash-attn does not take.
        cu_seqlens_q: the cumulative sequence lengths, int32 or int64 (batch_size + 1,), of which
            the first is 0; on the host or on q's device, or as a list.
        cu_seqlens_k: as cu_seqlens_q, of k.
        max_seqlen_q, max_seqlen_k: not needed: the lengths say them.
        dropout_p, softmax_scale, causal, window_size, softcap: as in :func:`flash_attn_func`. The
            NPU has no gradient for a window of (0, 0).
        alibi_slopes: as there. Where seqlen_k - seqlen_q differs between sequences, no key may come
            after the diagonal, and there may be no sink.
        deterministic, return_attn_probs, s_aux, learnable_sink: as there.
        block_table: int32 (batch_size, max_num_blocks). Without gradients, blocks are read where
            they are, as :func:`flash_attn_with_kvcache` says; otherwise every call copies them.
        out: where the result is written, of its shape and dtype; as in vLLM.

    Returns:
        As :func:`flash_attn_func`: out is (total_q, nheads, headdim of v), and softmax_lse
        (nheads, total_q), with +inf in rows behind the last sequence.

    Raises:
        As :func:`flash_attn_func`; the operator is called with layout "TND".

    Example:
        >>> import torch
        >>> from ascend_attn_ops.flash_attn import flash_attn_varlen_func
        >>> q = k = torch.zeros(9, 8, 64, dtype=torch.bfloat16)  # sequences of 3, 2 and 4
        >>> v = torch.arange(9).view(9, 1, 1).expand_as(q).bfloat16()
        >>> cu_seqlens = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True)
        >>> out[:, 0, 0].tolist()  # the mean of the values of a sequence so far
        [0.0, 0.5, 1.0, 3.0, 3.5, 5.0, 5.5, 6.0, 6.5]
    """
    result, lse = varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, block_table, deterministic, out, causal,
        window_size, softmax_scale, softcap, alibi_slopes, dropout_p, return_attn_probs,
        (s_aux, learnable_sink),
    )  # fmt: skip
    return result if lse is None else (result, lse, q.new_empty(0))


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: object, cu_seqlens_k: object,
    seqused_q: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None,
    deterministic: bool, out: Tensor | None, *arguments: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """flash_attn_varlen_func of both versions: out, and lse where it is asked for."""
    name = "flash_attn_varlen_func"
    conventions.check_tensors(name, 3, "q", q)
    conventions.check_tensors(name, 3 if block_table is None else 4, "k v", k, v)
    conventions.check_deterministic(name, q, deterministic)
    options = conventions.options_of(name, *arguments)
    result, lse = calls.attend_sequences(
        options, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table
    )
    return conventions.written(name, result, out), lse


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` of query, key and value in one tensor.

    Args:
        qkv: (batch_size, seqlen, 3, nheads, headdim): query, key, value.
    """
    q, k, v = parts_of("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` of key and value in one tensor.

    Args:
        q: (batch_size, seqlen_q, nheads, headdim).
        kv: (batch_size, seqlen_k, 2, nheads_k, headdim): key, value.
    """
    k, v = parts_of("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_varlen_func` of query, key and value in one tensor.

    Args:
        qkv: (total, 3, nheads, headdim): query, key, value.
        cu_seqlens, max_seqlen: of query and key.
    """
    q, k, v = parts_of("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens,
        max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_varlen_func` of key and value in one tensor.

    Args:
        q: (total_q, nheads, headdim).
        kv: (total_k, 2, nheads_k, headdim): key, value.
    """
    k, v = parts_of("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def parts_of(
    function: str, argument: str, packed: Tensor, rank: int, count: int
) -> tuple[Tensor, ...]:
    """The tensors that one holds, along the axis before the heads."""
    lead = "total" if rank == 4 else "batch_size, seqlen"
    heads = "nheads" if count == 3 else "nheads_k"
    axes = f"({lead}, {count}, {heads}, headdim)"
    check_tensor(function, argument, packed, rank, axes)
    if packed.shape[-3] != count:
        raise wrong(ValueError, function, argument, f"shape {axes}", str(list(packed.shape)))
    return packed.unbind(-3)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache, in place, and attend to all that it holds then.

    For inference: no gradient flows. A query sees the keys that it sees in
    :func:`flash_attn_func`, where seqlen_k is the number of keys that the cache holds of the
    sequence, the new ones included.

    Coming from flash-attn says which blocks are read where they lie, and which are copied. A
    cache_seqlens on the CPU, or one int for all sequences, does not wait for the device.

    Args:
        q: (batch_size, seqlen_q, nheads, headdim).
        k_cache: (batch_size, seqlen_cache, nheads_k, headdim); with block_table (num_blocks,
            block_size, nheads_k, headdim).
        v_cache: as k_cache. Its headdim may be smaller, which flash-attn does not take.
        k, v: (batch_size, seqlen_new, nheads_k, headdim), written behind the first cache_seqlens
            rows of a contiguous cache; None writes nothing.
        rotary_cos, rotary_sin: only None: rotate q and k before the call.
        cache_seqlens: how many rows of each sequence the cache holds before the call, one int or
            int32 (batch_size,). None, without k: all.
        cache_batch_idx: int32 (batch_size,), the rows of the caches that are meant: as a
            block_table of one block for each sequence.
        cache_leftpad: only None.
        block_table: int32 (batch_size, max_num_blocks), the blocks of each sequence; of any size.
            Block numbers on an NPU are not checked.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in
            :func:`flash_attn_varlen_func`.
        rotary_interleaved, num_splits: of no effect.
        return_softmax_lse: return the log-sum-exp, by which
            :func:`ascend_attn_ops.attention_update` merges results.
        s_aux, learnable_sink: as in :func:`flash_attn_func`, without a gradient.

    Returns:
        out, (batch_size, seqlen_q, nheads, headdim of v_cache). With return_softmax_lse (out,
        softmax_lse), float32 (batch_size, nheads, seqlen_q), **+inf** in rows that see no key, or
        the sink.

    Raises:
        NotImplementedError: softcap, rotary_cos, cache_leftpad; an argument requires grad while
            grad mode is on.
        TypeError, ValueError: an argument is wrong. The caches then are as they were.

    Example:
        >>> import torch
        >>> from ascend_attn_ops.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 128, 2, 64, dtype=torch.bfloat16)
        >>> q = torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 1, 2, 64, dtype=torch.bfloat16)
        >>> cache_seqlens = torch.tensor([7, 90], dtype=torch.int32)
        >>> out, softmax_lse = flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, return_softmax_lse=True)
        >>> softmax_lse[:, 0, 0].exp().round().tolist()  # how many keys a sequence has now
        [8.0, 91.0]
    """
    out, lse = attend_with_cache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_softmax_lse, (s_aux, learnable_sink),
    )  # fmt: skip
    return out if lse is None else (out, lse)
