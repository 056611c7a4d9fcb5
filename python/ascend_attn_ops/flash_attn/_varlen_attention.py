"""The operators as an implementation of flash attention in torch.nn.attention.

torch's varlen_attn calls operators of aten that have no kernel on the CPU. These are such kernels,
for the CPU and for NPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops.flash_attn import _calls as calls
from ascend_attn_ops.flash_attn import _conventions as conventions
from ascend_attn_ops.flash_attn._passes import packed_forward, packed_gradients

_REGISTER = "register_flash_attention_impl"
_FORWARD = "_flash_attention_forward"
_BACKWARD = "_flash_attention_backward"
_IN_PLACE = "_flash_attention_forward_no_dropout_inplace"
_DEVICES = ("CPU", "PrivateUse1")
_LENGTHS = ("cum_seq_q", "cum_seq_k")


class Kernels:
    """The registered kernels; what torch calls a handle."""

    def __init__(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        for name, kernel in ((_FORWARD, forward), (_BACKWARD, backward), (_IN_PLACE, in_place)):
            if hasattr(torch.ops.aten, name):  # the last one came with torch 2.12
                for device in _DEVICES:
                    library.impl(name, kernel, device)
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        # Its kernels go with it.
        self._library = None


def register_flash_attention_impl(impl: str = "ascend") -> None:
    """Let torch.nn.attention activate the operators as its flash attention, by the name `impl`.

    While they are active, :func:`torch.nn.attention.varlen.varlen_attn` runs on the CPU and on an
    NPU. It reads lengths as :func:`ascend_attn_ops.flash_attn.flash_attn_varlen_func` does.

    Args:
        impl: the name.

    Raises:
        TypeError: impl is not a string.
        NotImplementedError: this torch has no such registry, which came with 2.10.

    Example:
        >>> import torch
        >>> from ascend_attn_ops.flash_attn import register_flash_attention_impl
        >>> register_flash_attention_impl()
        >>> torch.nn.attention.activate_flash_attention_impl("ascend")
        >>> from torch.nn.attention.varlen import varlen_attn
        >>> x = torch.arange(3).view(3, 1, 1).expand(3, 8, 64).bfloat16()
        >>> cu_seq = torch.tensor([0, 1, 3], dtype=torch.int32)  # sequences of 1 and 2
        >>> varlen_attn(0 * x, x, x, cu_seq, cu_seq, 2, 2, window_size=(-1, 0))[:, 0, 0].tolist()
        [0.0, 1.0, 1.5]
    """
    if not isinstance(impl, str):
        raise wrong(TypeError, _REGISTER, "impl", "a string", type(impl).__name__)
    register = getattr(torch.nn.attention, _REGISTER, None)
    if register is None:
        got = f"{torch.__version__}; flash_attn_varlen_func needs no registry"
        raise wrong(NotImplementedError, _REGISTER, "torch", "2.10 or later", got)
    register(impl, register_fn=Kernels)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, softmax_logsumexp (nheads, total_q), and three that are of no use without dropout."""
    name = f"aten::{_FORWARD}"
    conventions.refuse_given(
        name, dropout_p=dropout_p, return_debug_mask=return_debug_mask, num_splits=num_splits
    )
    mask = _mask(name, is_causal, window_size_left, window_size_right)
    options = conventions.Options(
        name, mask, alibi_slopes, scale, return_lse=True, lengths=_LENGTHS
    )
    # The operator would cast, after torch has fixed the dtypes of this call and of its backward.
    with torch.autocast(query.device.type, enabled=False):
        out, lse = packed_forward(
            options, query, key, value, cum_seq_q, cum_seq_k, None, seqused_k, block_table
        )
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    # torch says float32, for float64 as well.
    return out, lse.float(), state, query.new_empty(0), query.new_empty(0)


def in_place(out: Tensor, *args: Any, **options: Any) -> Tensor:
    result, lse, *_ = forward(*args, **options)
    out.copy_(result)
    return lse


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    name = f"aten::{_BACKWARD}"
    conventions.refuse_given(name, dropout_p=dropout_p)
    mask = _mask(name, is_causal, window_size_left, window_size_right)
    options = conventions.Options(name, mask, scale=scale, lengths=_LENGTHS)
    pack = calls.pack_of(options, cum_seq_q, cum_seq_k)
    return packed_gradients(options, grad_out, query, key, value, out, logsumexp, pack)


def _mask(function: str, is_causal: bool, left: int | None, right: int | None) -> conventions.Mask:
    window = [-1 if x is None else x for x in (left, right)]
    return conventions.mask_of(function, is_causal, window)
