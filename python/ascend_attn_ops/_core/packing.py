"""Packs: sequences one after another along an axis of tokens, and the lists that describe them.

`lengths` are counts, one for each sequence. `ends` are cumulative lengths without a leading 0: they
say where each sequence ends. flash-attn's `cu_seqlens` are the same with the 0. For CANN, a last 0
closes the ends where tokens follow the last sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import (
    INT64_MAX,
    check_memory,
    check_tensor,
    readable,
    shown,
    whole,
    wrong,
)
from ascend_attn_ops._core.npu_graphs import captures

# The public functions take sequence lengths as a tensor or as a list, whatever the schema wants.
Lengths = Tensor | Sequence[int] | None
# The function and the argument that an error names.
Where = tuple[str, str]
_READ_BEFORE = ("ascend", "lengths")


def lengths_of(
    lengths: Lengths, query: Tensor | None = None, where: Where = _READ_BEFORE
) -> Sequence[int] | None:
    """The lengths as a list; waits for the device if they are a tensor on it."""
    if isinstance(lengths, Tensor):
        no_numbers = lengths.is_floating_point() or lengths.is_complex() or lengths.is_quantized
        if lengths.dim() != 1 or no_numbers:
            raise not_lengths(where, lengths)
        if lengths.is_meta and type(lengths) is Tensor:
            got = "a tensor on the device meta"
            raise wrong(ValueError, *where, "lengths to read", got)
        if captures(lengths.device):
            got = "a tensor, which the host cannot read before it runs"
            raise wrong(NotImplementedError, *where, "a list, in a graph's call", got)
        check_memory(*where, lengths)
        if lengths._is_zerotensor():
            # torch's zeros without memory, as forward-mode derivatives have them.
            lengths = lengths.clone()
        return cast("list[int]", lengths.tolist())
    if lengths is not None and getattr(lengths, "ndim", 0) == 1:
        # An array, which is neither true nor false.
        lengths = list(lengths)
    if isinstance(lengths, (list, tuple)):
        # Whole numbers may be symbols here.
        if any(type(x) is not int and whole(x) is None for x in lengths):
            raise not_lengths(where, lengths)
    elif not _in_order(lengths):
        raise not_lengths(where, lengths)
    return lengths


def lengths_tensor(lengths: Lengths, where: Where = _READ_BEFORE) -> Tensor | None:
    """The lengths as a tensor: one on the host of those in a list."""
    # The operator refuses lengths of a wrong type.
    if lengths is None or isinstance(lengths, Tensor):
        return lengths
    if is_dynamo_compiling():
        return torch.tensor(lengths, dtype=torch.int64, device="cpu")
    if not hasattr(lengths, "__iter__") or not _in_order(lengths):
        raise not_lengths(where, lengths)
    try:
        numbers = [index(length) for length in lengths]
    except TypeError:
        raise not_lengths(where, lengths) from None
    if max(map(abs, numbers), default=0) > INT64_MAX:
        raise wrong(ValueError, *where, "numbers of 64 bits", shown(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def lengths_on(lengths: Lengths, like: Tensor) -> Tensor | None:
    """The lengths as a tensor on the device of `like`, without waiting for it."""
    tensor = lengths_tensor(lengths)
    if tensor is None or not isinstance(like, Tensor) or tensor.device == like.device:
        return tensor
    if like.device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return tensor.to(like.device)
    if captures(like.device):
        got = "one on the host, which a replay cannot change"
        expected = f"a tensor on {like.device}, in a graph's call"
        raise wrong(NotImplementedError, *_READ_BEFORE, expected, got)
    return tensor.pin_memory().to(like.device, non_blocking=True)


def _in_order(lengths: Any) -> bool:
    """False of text, of arrays with several axes, and of what has no order or is read once."""
    if isinstance(lengths, Sequence):
        return not isinstance(lengths, (str, bytes))
    if hasattr(lengths, "__array__"):
        return getattr(lengths, "ndim", 0) == 1
    return not hasattr(lengths, "__iter__")


def not_lengths(where: Where, got: Any) -> TypeError:
    return wrong(TypeError, *where, "whole numbers, as a list or as a tensor", shown(got))


def bounds_on_host(integers: Tensor) -> list[int] | None:
    """The first, the smallest and the largest of integers of one axis on the host; None for others,
    which the caller checks by steps that take longer."""
    plain = type(integers) is Tensor and not torch.compiler.is_compiling()
    return _C.bounds_of(integers) if plain else None


def ends_of(function: str, argument: str, cu_seqlens: object) -> Any:
    """Returns the ends that cu_seqlens has behind its leading 0, as a list or a view of a tensor.

    The 0 of a tensor is checked on the host alone, without waiting for a device.
    """
    first: Any = 0
    if isinstance(cu_seqlens, Tensor):
        if bounds := bounds_on_host(cu_seqlens):
            first = bounds[0]
        else:
            check_tensor(function, argument, cu_seqlens, 1, "(batch_size + 1,)")
        count = cu_seqlens.shape[0]
        if bounds is None and readable(cu_seqlens) and count:
            check_memory(function, argument, cu_seqlens)
            first = cu_seqlens[0].item()
    elif isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, (str, bytes)):
        count = len(cu_seqlens)
        first = cu_seqlens[0] if count else 0
        if isinstance(first, Tensor) and first.dim():
            raise not_lengths((function, argument), cu_seqlens)
    else:
        expected = "a tensor, or its values as a list"
        raise wrong(TypeError, function, argument, expected, type(cu_seqlens).__name__)
    if count < 2 or first != 0:
        expected = "the batch_size + 1 cumulative sequence lengths, of which the first is 0"
        if first != 0:
            expected += " (of counts: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))"
        values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) and first else cu_seqlens
        raise wrong(ValueError, function, argument, expected, shown(values))
    return cu_seqlens[1:]


def lengths_in(ends: Lengths, like: Tensor | None = None) -> Tensor:
    """Returns the lengths of sequences from their ends, as a tensor on the device of `like`."""
    bounds = lengths_tensor(ends) if like is None else lengths_on(ends, like)
    assert bounds is not None
    return bounds.diff(prepend=bounds.new_zeros(1))


def lengths_between(ends: Sequence[int], *, closed: bool = False) -> list[int]:
    """The lengths of sequences from their ends. `closed`: a last 0 is an empty sequence."""
    both = [0, *(accumulate(ends, max) if closed else ends)]
    return [end - begin for begin, end in pairwise(both)]


def begins_of_runs(x: Tensor, step: int) -> list[int]:
    """Where runs begin in the flattened rows of (B, S), in which a number is the one before plus
    `step`. Waits for the device."""
    starts = torch.ones_like(x, dtype=torch.bool)
    starts[:, 1:] = x.diff(dim=-1) != step
    return starts.flatten().nonzero().flatten().tolist()


def without_empty(ends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ends (queries, keys) of the sequences that have either."""
    return [end for before, end in pairwise([(0, 0), *ends]) if end != before]


def equal_ends(length: int, count: int) -> list[int]:
    """The ends of `count` sequences of one length."""
    return [length * (i + 1) for i in range(count)]
