"""Packs: sequences one after another along an axis of tokens, and the lists that describe them.

`lengths` are counts, one for each sequence. `ends` are cumulative lengths without a leading 0: they
say where each sequence ends. flash-attn's `cu_seqlens` are the same with the 0. For CANN, a last 0
closes the ends where tokens follow the last sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress, pairwise
from operator import index
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from ascend_attn_ops._arguments import check_memory, dtype_name, shown, whole, wrong
from ascend_attn_ops._npu_graphs import captures

# The public functions take sequence lengths as a tensor or as a list, whatever the schema wants.
Lengths = Tensor | Sequence[int] | None
# The function and the argument that an error names.
Where = tuple[str, str]
_READ_BEFORE = ("ascend", "lengths")

# Holds, for a tensor on a device, its version when it was copied, and the values.
_ON_HOST = WeakTensorKeyDictionary()


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
            raise _not_in_graph(where, "a list", got)
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


def lengths_on(lengths: Lengths, query: Tensor, where: Where = _READ_BEFORE) -> Tensor | None:
    """The lengths as a tensor on the device of `query`, without waiting for it."""
    # The operator refuses lengths of a wrong type.
    if lengths is None or isinstance(lengths, Tensor) or not hasattr(lengths, "__iter__"):
        return cast("Tensor | None", lengths)
    # And so is the query.
    if not isinstance(query, Tensor):
        return None
    if is_dynamo_compiling():
        return torch.tensor(lengths, dtype=torch.int32, device=query.device)
    if not _in_order(lengths):
        raise not_lengths(where, lengths)
    try:
        numbers = [index(length) for length in lengths]
    except TypeError:
        raise not_lengths(where, lengths) from None
    limit = torch.iinfo(torch.int32).max
    if max(map(abs, numbers), default=0) > limit:
        raise wrong(ValueError, *where, f"lengths of at most {limit}", shown(numbers))
    on_host = torch.tensor(numbers, dtype=torch.int32)
    if query.device.type in ("cpu", "meta"):
        return on_host.to(query.device)
    if captures(query.device):
        got = f"{shown(numbers)}, which a replay cannot change"
        raise _not_in_graph(where, f"a tensor on {query.device}", got)
    return on_host.pin_memory().to(query.device, non_blocking=True)


def _in_order(lengths: Any) -> bool:
    """False of text, of arrays with several axes, and of what has no order or is read once."""
    if isinstance(lengths, Sequence):
        return not isinstance(lengths, (str, bytes))
    if hasattr(lengths, "__array__"):
        return getattr(lengths, "ndim", 0) == 1
    return not hasattr(lengths, "__iter__")


def not_lengths(where: Where, got: Any) -> TypeError:
    return wrong(TypeError, *where, "whole numbers, as a list or as a tensor", shown(got))


def _not_in_graph(where: Where, expected: str, got: str) -> NotImplementedError:
    function, argument = where
    text = f"{function}: {argument}: expected {expected}, in a graph's call, got {got}"
    return NotImplementedError(text)


def counts(function: str, argument: str, tensor: Tensor, size: int | None = None) -> list[int]:
    """The values of lengths or of their cumulative sums."""
    if tensor.dtype != torch.int32:
        raise wrong(TypeError, function, argument, "dtype int32", dtype_name(tensor.dtype))
    if tensor.dim() != 1 or (size is not None and tensor.shape[0] != size):
        wanted = "batch_size + 1" if size is None else size
        raise wrong(ValueError, function, argument, f"shape ({wanted},)", str(list(tensor.shape)))
    if tensor.is_meta and type(tensor) is Tensor:
        raise wrong(
            ValueError, function, argument, "numbers to read", "a tensor on the device meta"
        )
    check_memory(function, argument, tensor)
    return tensor.tolist() if tensor.is_cpu else _host_values(tensor)


def _host_values(tensor: Tensor) -> list[int]:
    """The values of a tensor on a device, copied once as long as they do not change: the layers of
    a model share their lengths, and each copy waits for the device."""
    # A tensor of inference mode does not count its changes.
    if tensor.is_inference() or torch.compiler.is_compiling():
        return tensor.tolist()
    version, values = _ON_HOST.get(tensor, (None, []))
    if version != tensor._version:
        values = tensor.tolist()
        _ON_HOST[tensor] = (tensor._version, values)
    return values


def ends_of(function: str, argument: str, cu_seqlens: object) -> list[int]:
    """The ends that cu_seqlens has behind its leading 0."""
    if isinstance(cu_seqlens, Tensor):
        values = counts(function, argument, cu_seqlens)
    elif isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, (str, bytes)):
        values = list(cu_seqlens)
        if any(type(x) is not int and whole(x) is None for x in values):
            expected = "a tensor, or its values as a list of whole numbers"
            raise wrong(TypeError, function, argument, expected, shown(values))
    else:
        expected = "a tensor, or its values as a list"
        raise wrong(TypeError, function, argument, expected, type(cu_seqlens).__name__)
    if len(values) < 2 or values[0] != 0:
        expected = "the batch_size + 1 cumulative sequence lengths, of which the first is 0"
        if values and values[0] != 0:
            expected += " (of counts: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int())"
        raise wrong(ValueError, function, argument, expected, shown(values))
    return values[1:]


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


def with_gaps(
    query: Sequence[tuple[int, int]], key: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Returns ends of sequences that use only their first tokens, so that nothing is copied.

    Unused queries become a sequence without keys, and unused keys one without queries. Every
    sequence is followed by both, or by those alone that any of them has.

    Args:
        query: for each sequence, how many queries it uses, and how many it has room for.
        key: the same of its keys.
    """
    kept = (True, *(any(used < room for used, room in side) for side in (query, key)))
    query_lengths = [n for used, room in query for n in compress((used, room - used, 0), kept)]
    key_lengths = [n for used, room in key for n in compress((used, 0, room - used), kept)]
    return list(accumulate(query_lengths)), list(accumulate(key_lengths))


def one_key_each(
    q_ends: Sequence[int], k_ends: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Splits sequences into pairs of one query and its own key, counted from the last ones.

    Returns the ends of the pairs for queries and keys, and the number of parts of each sequence.
    Its first part holds the queries or keys without a partner.
    """
    q_lengths, k_lengths, parts = [], [], []
    for queries, keys in zip(lengths_between(q_ends), lengths_between(k_ends), strict=True):
        both = max(min(queries, keys), 0)
        q_lengths += [queries - both, *[1] * both]
        k_lengths += [keys - both, *[1] * both]
        parts.append(1 + both)
    return list(accumulate(q_lengths)), list(accumulate(k_lengths)), parts


def closed(
    q: Tensor, k: Tensor, q_ends: list[int], k_ends: list[int]
) -> tuple[list[int], list[int]]:
    """Appends the 0 that CANN requires if queries and keys have tokens after the last sequence."""
    q_end, k_end = (ends[-1] if ends else 0 for ends in (q_ends, k_ends))
    if q.shape[0] > q_end and k.shape[0] > k_end:
        return [*q_ends, 0], [*k_ends, 0]
    return q_ends, k_ends
