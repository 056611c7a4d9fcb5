"""Attention with the axes, defaults and meaning of torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import (
    check_count,
    check_flag,
    check_memory,
    check_tensor,
    dtype_name,
    renamed,
    shown,
    wrong,
)
from ascend_attn_ops._core.packing import ends_of
from ascend_attn_ops.nn.masks import Band, Causal, Mask
from ascend_attn_ops.ops.flash_attention_score import flash_attention_score

_NAME = "ascend::attention"
# Names in the operator's errors, and ours for the same.
_NAMES = {
    "ascend::flash_attention_score": _NAME, "actual_seq_lengths_query": "cu_seqlens_q",
    "actual_seq_lengths_key": "cu_seqlens_k", "pse_shift": "attn_mask", "scale_value": "scale",
}  # fmt: skip


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    window: Sequence[int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """Attention as torch's scaled_dot_product_attention has it, by one call of the operator.

    ::

        out = dropout(softmax(query @ key^T * scale + attn_mask)) @ value

    Axes, defaults and meaning of what torch's function has are torch's; window, sink, cu_seqlens
    and mask are further arguments. At most one of attn_mask, is_causal, window and mask is given.
    **The output of a row that keeps no key is zero, and so are its gradients**; in torch it is 0 or
    NaN, by version, backend and mask.

    Differentiable with respect to query, key, value and sink; on the CPU also with respect to a
    float attn_mask. Compiles into one graph: no value of a tensor is read in Python.

    Args:
        query: (B, N, Sq, D); without an axis of heads (B, Sq, D) or (Sq, D), with more batches
            (..., N, Sq, D). float16, bfloat16 or float32 (float64 as well when the device limits
            are off).
        key: (B, N, Skv, D); batches and heads broadcast, by copies except for one head.
        value: (B, N, Skv, Dv), with a Dv of at most D.
        attn_mask: of any shape that broadcasts to (B, N, Sq, Skv). bool: True keeps a key. Floating
            point: added to the scores, in query's dtype; -inf leaves a key out, for which a bool
            mask needs less memory. Or one of torch.nn.attention.bias.
        dropout_p: probability of dropping a weight, drawn by torch's default generator of query's
            device; in training and out of it, as in torch.
        is_causal: no query sees a later key, from the top left: ``mask=Causal("top-left")``.
        window: (left, right) as in flash-attn: how many keys before and after the diagonal, which
            ends at the bottom right; -1 for all. (128, 0) is a causal sliding window.
        scale: factor of the scores; None for 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads, a divisor of N.
        sink: (N,), the score of one more key of each head, without a value, as in gpt_oss.
        cu_seqlens_q: (B + 1,), int32 or int64: packed sequences. query is (T, N, D) then, and rows
            cu_seqlens_q[b] to cu_seqlens_q[b + 1] are sequence b. An NPU waits for lengths that
            are there, and for none on the host.
        cu_seqlens_k: the same of key and value; None for cu_seqlens_q.
        mask: :class:`Causal`, :class:`Band`, :class:`Prefix` or :class:`CutCausal`; in a pack each
            holds for every sequence by itself.

    Returns:
        (B, N, Sq, Dv), or the batches and axes of query, in its dtype; packed (T, N, Dv).

    Raises:
        TypeError: an argument has another type, or a dtype is not supported or disagrees.
        ValueError: shapes do not fit, several masks are given, or a device limit is violated.
        NotImplementedError: the product in force has no such operator; an attn_mask that requires
            grad on an NPU; an attn_mask beside cu_seqlens; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = key = torch.zeros(1, 1, 4, 64)  # all keys weigh the same
        >>> value = torch.arange(4.0)[:, None].expand(1, 1, 4, 64)
        >>> ascend_attn_ops.attention(query, key, value, is_causal=True)[0, 0, :, 0]
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
        >>> ascend_attn_ops.attention(query, key, value, window=(1, 0))[0, 0, :, 0]
        tensor([0.0000, 0.5000, 1.5000, 2.5000])

    Source: torch's documentation of scaled_dot_product_attention; the operator's is
    docs/operators/flash_attention_score.md.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(_NAME, name, x)
    check_flag(_NAME, "enable_gqa", enable_gqa)
    chosen = _mask_of(attn_mask, is_causal, window, mask)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale_value": scale, "sink": sink}
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if attn_mask is not None and chosen is None:
            expected = "None beside cu_seqlens_q; mask= has those of each sequence"
            raise wrong(NotImplementedError, _NAME, "attn_mask", expected, shown(attn_mask))
        of_queries = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
        of_keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        ends = ends_of(_NAME, "cu_seqlens_q", of_queries)
        options["actual_seq_lengths_query"] = ends
        options["actual_seq_lengths_key"] = ends_of(_NAME, "cu_seqlens_k", of_keys)
        if query.dim() == key.dim() == value.dim() == 3:
            _check_heads([x.shape[1] for x in (query, key, value)], enable_gqa)
        if chosen is not None:
            options.update(chosen.arguments(batch=len(ends)))
        return _call(query, key, value, layout="TND", **options)
    bias = None if chosen is not None else attn_mask
    query, key, value, bias, axes = _four_axes(query, key, value, bias, enable_gqa)
    if bias is not None:
        options.update(_operators_mask(bias, query, key))
    elif chosen is not None:
        options.update(chosen.arguments(query.shape[2], key.shape[2], query.shape[0]))
    out = _call(query, key, value, layout="BNSD", **options)
    return out if out.dim() == len(axes) + 2 else out.reshape(*axes, *out.shape[2:])


def _call(*tensors: Tensor, **options: Any) -> Tensor:
    try:
        return flash_attention_score(*tensors, **options)[0]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(renamed(str(error), _NAMES)) from None


def _mask_of(
    attn_mask: Tensor | None, is_causal: bool, window: Sequence[int] | None, mask: Mask | None
) -> Mask | None:
    """The one mask that is given; None for an attn_mask that is a tensor of its own."""
    check_flag(_NAME, "is_causal", is_causal)
    given = {"mask": mask, "is_causal": is_causal or None, "window": window, "attn_mask": attn_mask}
    names = [name for name, x in given.items() if x is not None]
    if len(names) > 1:
        hint = "; window=(left, 0) is causal" if "window" in names else ""
        expected = f"None beside {names[0]}{hint}"
        raise wrong(ValueError, _NAME, names[1], expected, shown(given[names[1]]))
    if is_causal:
        return Causal("top-left")
    if attn_mask is not None and type(attn_mask) is not Tensor:
        from torch.nn.attention.bias import CausalBias, CausalVariant  # which takes a second

        if isinstance(attn_mask, CausalBias):
            upper = attn_mask.variant == CausalVariant.UPPER_LEFT
            return Causal("top-left" if upper else "bottom-right")
    if mask is not None and not isinstance(mask, Mask):
        expected = "Causal, Band, Prefix or CutCausal (tensors are attn_mask)"
        raise wrong(TypeError, _NAME, "mask", expected, shown(mask))
    if window is None:
        return mask
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong(ValueError, _NAME, "window", "(left, right)", shown(window))
    left, right = (check_count(_NAME, "window", x, least=-1) for x in window)
    return Band(None if left == -1 else left, None if right == -1 else right)


def _check_heads(heads: Sequence[int], enable_gqa: bool) -> None:
    of_query, of_key, of_value = heads
    if not enable_gqa and not (of_key == of_value and of_key in (1, of_query)):
        expected = f"{of_query} heads (query's), or fewer with enable_gqa=True"
        name, got = ("key", of_key) if of_key != of_query else ("value", of_value)
        raise wrong(ValueError, _NAME, name, expected, str(got))


def _four_axes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[int]]:
    """Views (B, N, S, D), a mask of four axes, and the axes that out has before its tokens."""
    tensors = [query, key, value]
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if x.dim() < 2:
            raise wrong(ValueError, _NAME, name, "shape (..., N, S, D)", str(list(x.shape)))
    rank = max(x.dim() for x in tensors)
    if attn_mask is not None:
        check_tensor(_NAME, "attn_mask", attn_mask)
        if attn_mask.dim() > rank:
            got = str(list(attn_mask.shape))
            raise wrong(ValueError, _NAME, "attn_mask", f"at most {rank} axes", got)
    # Without heads, batches are batches: they have no limit.
    heads = rank > 3 or (rank == 3 and bool(enable_gqa))
    axes = max(rank + (not heads), 4)
    if not heads:
        tensors = [x.unsqueeze(-3) if x.dim() > 2 else x for x in tensors]
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.unsqueeze(-3)
    query, key, value = (_with_axes(x, axes) for x in tensors)
    lead, numbers = query.shape[:-3], [x.shape[-3] for x in (query, key, value)]
    if not lead == key.shape[:-3] == value.shape[:-3]:
        try:
            lead = torch.broadcast_shapes(lead, key.shape[:-3], value.shape[:-3])
        except RuntimeError:
            got = f"{list(key.shape[:-3])} and {list(value.shape[:-3])} of key and value"
            expected = f"batches that broadcast to {list(lead)} (query's)"
            raise wrong(ValueError, _NAME, "key", expected, got) from None
    # The operator has one head of key and value serve all.
    number = max(numbers) if not enable_gqa and numbers[1:] != [1, 1] else 0
    if number and all(x in (1, number) for x in numbers):
        numbers = [number] * 3
    _check_heads(numbers, bool(enable_gqa))
    query, key, value = (
        x.expand(*lead, n, -1, -1).flatten(0, -4)
        for x, n in zip((query, key, value), numbers, strict=True)
    )
    if attn_mask is not None:
        attn_mask = _with_axes(attn_mask, axes)
        if axes > 4:
            every = any(x != 1 for x in attn_mask.shape[:-3])
            where = lead if every else [1] * len(lead)
            attn_mask = attn_mask.expand(*where, -1, -1, -1).flatten(0, -4)
    before = [*lead, numbers[0]] if heads else [*lead]
    return query, key, value, attn_mask, before[len(before) - rank + 2 :]


def _with_axes(x: Tensor, axes: int) -> Tensor:
    return x if x.dim() == axes else x.reshape([1] * (axes - x.dim()) + [*x.shape])


def _operators_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Tensor | int]:
    sizes = (*query.shape[:3], key.shape[2])
    if any(x not in (1, size) for x, size in zip(attn_mask.shape, sizes, strict=True)):
        got = str(list(attn_mask.shape))
        expected = f"a shape that broadcasts to {tuple(sizes)}"
        raise wrong(ValueError, _NAME, "attn_mask", expected, got)
    if attn_mask.dtype == torch.bool:
        return {"attn_mask": attn_mask}
    if not attn_mask.is_floating_point():
        got = dtype_name(attn_mask.dtype)
        raise wrong(TypeError, _NAME, "attn_mask", "dtype bool or floating point", got)
    if not torch.compiler.is_compiling():
        check_memory(_NAME, "attn_mask", attn_mask)
    dtype, device = query.dtype, query.device.type
    if device != "meta" and dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    bias = attn_mask.to(dtype)
    # Selected and not added: a device makes NaN of -inf, and rows without keys are to be zero.
    left_out = bias == -torch.inf
    bias = bias.masked_fill(left_out, 0).expand(*bias.shape[:3], key.shape[2])
    return {"pse_shift": bias, "pse_type": 0, "atten_mask": left_out}
