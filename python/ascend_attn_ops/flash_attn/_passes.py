"""Forward and backward of flash-attn's attention as passes of their own, without autograd.

Libraries that spread a sequence over several devices call them, and merge the results themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_tensor, wrong
from ascend_attn_ops._core.packing import equal_ends
from ascend_attn_ops._core.statistics import LANES, by_sequence, statistics_of
from ascend_attn_ops.flash_attn import _calls as calls
from ascend_attn_ops.flash_attn import _conventions as conventions
from ascend_attn_ops.flash_attn._calls import Pack
from ascend_attn_ops.flash_attn._conventions import Options
from ascend_attn_ops.ops.flash_attention_score_grad import flash_attention_score_grad

Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(
    options: Options, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    """dq, dk and dv of sequences of one length; lse is (batch_size, nheads, seqlen_q)."""
    _check_shape(options.function, lse, [q.shape[0], q.shape[2], q.shape[1]])
    if options.slopes is not None and q.shape[0] and q.shape[1] != k.shape[1]:
        batch, queries = q.shape[:2]
        dout, q, k, v, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
        keys = k.shape[0] // batch
        found = packed_gradients(
            options, dout, q, k, v, out, lse.transpose(0, 1).flatten(1),
            Pack(equal_ends(queries, batch), equal_ends(keys, batch)),
        )  # fmt: skip
        dq, dk, dv = (d.unflatten(0, (batch, -1)) for d in found)
        return dq, dk, dv
    keywords = {
        "layout": "BSND", "pse_shift": options.slopes,
        "pse_type": 1 if options.slopes is None else 2, **options.mask.arguments(),
    }  # fmt: skip
    maximum, total = _statistics(q, lse)
    return _gradients(options, dout, q, k, v, out, maximum, total, keywords)


def packed_gradients(
    options: Options, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pack: Pack,
) -> Gradients:  # fmt: skip
    """dq, dk and dv of packed sequences; lse is (nheads, total_q)."""
    _check_shape(options.function, lse, [q.shape[1], q.shape[0]])
    call = calls.packed_call(options, q, k, pack)
    statistics = _statistics(q, call.shifted(lse, -1))
    maximum, total = (by_sequence(x, pack.q_ends) for x in statistics)
    return _gradients(options, dout, q, k, v, out, maximum, total, call.keywords, pack.parts)


def _statistics(q: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The operator's statistics of each row, as often as it repeats them."""
    lse = lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    maximum, total = (
        x[..., None].expand(*x.shape, LANES).contiguous()
        for x in statistics_of(lse, conventions.WITHOUT_KEYS)
    )
    return maximum, total


def _gradients(
    options: Options, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, maximum: Tensor,
    total: Tensor, keywords: dict[str, Any], parts: int = 1,
) -> Gradients:  # fmt: skip
    return conventions.call(
        options, flash_attention_score_grad, q, k, v, dout, maximum, total, out, parts=parts,
        **{**keywords, "scale_value": options.scale},
    )  # fmt: skip


def _check_shape(function: str, lse: Tensor, expected: list[int]) -> None:
    check_tensor(function, "softmax_lse", lse)
    if list(lse.shape) != expected:
        shape = f"shape {expected}"
        raise wrong(ValueError, function, "softmax_lse", shape, str(list(lse.shape)))


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The forward pass of `flash_attn_func`: out, softmax_lse (batch_size, nheads, seqlen_q), and
    an empty tensor for the probabilities and zeros for the state of a random generator."""
    return _with_nothing_random(*forward_pass(
        "_flash_attn_forward", (q, k, v), None, None, causal, window_size_left, window_size_right,
        softmax_scale, softcap, alibi_slopes, dropout_p,
    ))  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The forward pass of `flash_attn_varlen_func`: as `_flash_attn_forward`, with softmax_lse
    (nheads, total_q)."""
    name = "_flash_attn_varlen_forward"
    conventions.refuse_given(name, leftpad_k=leftpad_k)
    return _with_nothing_random(*forward_pass(
        name, (q, k, v), (cu_seqlens_q, cu_seqlens_k, None, seqused_k), block_table, causal,
        window_size_left, window_size_right, softmax_scale, softcap, alibi_slopes, dropout_p,
    ))  # fmt: skip


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the gradients of `_flash_attn_forward` to dq, dk and dv. out and softmax_lse may be
    those of all keys where k and v are a part of them. Returns an empty tensor: the row sums of
    dout * out are not kept."""
    backward_pass(
        "_flash_attn_backward", (dout, q, k, v, out), softmax_lse, (dq, dk, dv), None,
        deterministic, causal, window_size_left, window_size_right, softmax_scale, softcap,
        alibi_slopes, dropout_p,
    )  # fmt: skip
    return softmax_lse.new_empty(0)


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """As `_flash_attn_backward`, for `_flash_attn_varlen_forward`."""
    backward_pass(
        "_flash_attn_varlen_backward", (dout, q, k, v, out), softmax_lse, (dq, dk, dv),
        (cu_seqlens_q, cu_seqlens_k), deterministic, causal, window_size_left, window_size_right,
        softmax_scale, softcap, alibi_slopes, dropout_p,
    )  # fmt: skip
    return softmax_lse.new_empty(0)


def forward_pass(
    function: str, tensors: tuple[Tensor, Tensor, Tensor], lengths: tuple[Any, ...] | None,
    block_table: Tensor | None, *arguments: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A forward of sequences of one length, or of a pack with lengths: cu_seqlens and seqused."""
    rank, (q, k, v) = 4 if lengths is None else 3, tensors
    conventions.check_tensors(function, rank, "q", q)
    conventions.check_tensors(function, rank if block_table is None else 4, "k v", k, v)
    options = _options_of(function, *arguments)
    if lengths is not None:
        return packed_forward(options, q, k, v, *lengths, block_table)
    with torch.no_grad():
        out, lse = calls.attend(options, q, k, v)
    assert lse is not None
    return out, lse


def backward_pass(
    function: str, tensors: tuple[Tensor, ...], lse: Tensor, targets: tuple[Tensor | None, ...],
    lengths: tuple[Any, ...] | None, deterministic: bool, *arguments: Any,
) -> None:  # fmt: skip
    """A backward, which writes the gradients to the targets that are not None."""
    dout, q, k, v, out = tensors
    conventions.check_tensors(function, 4 if lengths is None else 3, "dout q k v out", *tensors)
    conventions.check_deterministic(function, q, deterministic)
    options = _options_of(function, *arguments)
    if lengths is None:
        found = gradients(options, dout, q, k, v, out, lse)
    else:
        pack = calls.pack_of(options, *lengths)
        found = packed_gradients(options, dout, q, k, v, out, lse, pack)
    for result, target in zip(found, targets, strict=True):
        if target is not None:
            target.copy_(result)


def _options_of(
    function: str, causal: bool, left: int, right: int, softmax_scale: float | None, softcap: float,
    slopes: Tensor | None = None, dropout_p: float = 0.0,
) -> Options:  # fmt: skip
    """The options of a pass. A backward of its own could not draw the mask of a dropout again."""
    conventions.refuse_given(function, dropout_p=dropout_p)
    return conventions.options_of(
        function, causal, (left, right), softmax_scale, softcap, slopes, 0.0, return_lse=True
    )


def packed_forward(options: Options, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The arguments are those of `attend_sequences`."""
    with torch.no_grad():
        out, lse = calls.attend_sequences(options, *arguments)
    assert lse is not None
    return out, lse


def _with_nothing_random(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return out, lse, out.new_empty(0), torch.zeros(2, dtype=torch.int64, device=out.device)
