"""flash-attn's conventions on flash_attention_score: windows, prefix sums, slopes, log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ascend_attn_ops._arguments import (
    INT64_MAX,
    check_flag,
    check_memory,
    check_number,
    check_tensor,
    dtype_name,
    readable,
    shown,
    tensors_in,
    whole,
    wrong,
)
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops.operators.flash_attention_score import flash_attention_score

_FLT_MAX = torch.finfo(torch.float32).max
_LANES = 8  # how often each statistic is given
_SHAPES = {3: "(total, nheads, headdim)", 4: "(batch_size, seqlen, nheads, headdim)"}

# What was copied from a device: the version of the tensor then, and its values.
_ON_HOST = WeakTensorKeyDictionary()


class Mask(NamedTuple):
    """Which keys are kept, in the operator's terms: the corner is always the bottom right one."""

    sparse_mode: int
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS

    @property
    def looks_back(self) -> bool:
        """Whether no key comes after the diagonal."""
        return self.sparse_mode == 3 or self.next_tokens == 0


_EVERYTHING, _CAUSAL = Mask(0), Mask(3)


def mask_of(function: str, causal: bool, window_size: Sequence[int]) -> Mask:
    for tensor in tensors_in(window_size):
        check_memory(function, "window_size", tensor)
    try:
        # A tensor may have more rows than memory has room for.
        left, right = window_size if len(window_size) == 2 else ()
    except (TypeError, ValueError, RuntimeError):
        raise wrong(
            ValueError, function, "window_size", "(left, right)", shown(window_size)
        ) from None
    if whole(left) is None or whole(right) is None:
        expected = "(left, right), two whole numbers"
        raise wrong(TypeError, function, "window_size", expected, shown(window_size))
    left, right = whole(left), whole(right)
    if not (-1 <= left <= INT64_MAX and -1 <= right <= INT64_MAX):
        expected = "-1, which bounds nothing, or more"
        raise wrong(ValueError, function, "window_size", expected, f"({left}, {right})")
    check_flag(function, "causal", causal)
    if causal:
        right = 0
    if left == -1 and right <= 0:
        return _EVERYTHING if right else _CAUSAL
    return Mask(4, ALL_TOKENS if left == -1 else left, ALL_TOKENS if right == -1 else right)


def check_tensors(function: str, rank: int, names: str, *tensors: object) -> None:
    """What is read here before the operator checks its arguments."""
    for x in tensors:
        if not isinstance(x, Tensor) or x.dim() != rank:
            name = names.split()[[y is x for y in tensors].index(True)]
            check_tensor(function, name, x, rank, _SHAPES[rank])


def check_options(
    function: str,
    softmax_scale: float | None,
    softcap: float,
    *,
    dropout_p: float = 0.0,
    **flags: bool,
) -> None:
    """What all functions have. The operator knows other names, and no softcap."""
    if softmax_scale is not None and not isinstance(softmax_scale, float):
        check_number(function, "softmax_scale", softmax_scale)
    if not isinstance(softcap, float):
        check_number(function, "softcap", softcap)
    if softcap > 0:
        refuse(function, "softcap", "0, as no operator caps its scores", shown(softcap))
    if not isinstance(dropout_p, float):
        check_number(function, "dropout_p", dropout_p)
    for name, flag in flags.items():
        check_flag(function, name, flag)


def under_autocast(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """In autocast's dtype where they are float32, as what is written to a cache has to be."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x
        for x in (q, *others)
    )


def check_indices(function: str, argument: str, indices: object, rank: int) -> None:
    if not isinstance(indices, Tensor):
        raise wrong(TypeError, function, argument, "a tensor", type(indices).__name__)
    if indices.dtype not in (torch.int32, torch.int64):
        raise wrong(TypeError, function, argument, "dtype int32", dtype_name(indices.dtype))
    if indices.dim() != rank:
        raise wrong(ValueError, function, argument, f"rank {rank}", str(list(indices.shape)))


def check_slopes(function: str, slopes: object) -> None:
    """The rest is the operator's to refuse."""
    if slopes is None:
        return
    if not isinstance(slopes, Tensor):
        expected = "a tensor or None"
        raise wrong(TypeError, function, "alibi_slopes", expected, type(slopes).__name__)


def check_values_of_slopes(function: str, slopes: Tensor | None) -> None:
    """Where the operator is asked without values first."""
    if slopes is None or slopes.dtype != torch.float32:
        return
    if readable(slopes) and not bool((slopes > 0).all()):
        raise wrong(ValueError, function, "alibi_slopes", "positive slopes", "others")


def refuse(function: str, argument: str, expected: str, got: str) -> None:
    raise NotImplementedError(f"{function}: {argument}: expected {expected}, got {got}")


def _host_values(tensor: Tensor) -> list[int]:
    """The values of a tensor on a device. They are copied once, as long as they do not change: the
    layers of a model share their lengths, and each copy waits for the device."""
    # A tensor of inference mode does not count its changes.
    if tensor.is_inference() or torch.compiler.is_compiling():
        return tensor.tolist()
    version, values = _ON_HOST.get(tensor, (None, []))
    if version != tensor._version:
        values = tensor.tolist()
        _ON_HOST[tensor] = (tensor._version, values)
    return values


def counts(function: str, argument: str, tensor: Tensor, size: int | None = None) -> list[int]:
    """The values of lengths or of their prefix sums."""
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


def ends_of(function: str, argument: str, cu_seqlens: object) -> list[int]:
    """Prefix sums without the leading 0."""
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
        expected = "the batch_size + 1 prefix sums of the lengths, of which the first is 0"
        raise wrong(ValueError, function, argument, expected, shown(values))
    return values[1:]


def lengths_of(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise([0, *ends])]


def from_blocks(
    function: str, k: Tensor, v: Tensor, table: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The blocks of each sequence side by side, (batch_size, slots, nheads_k, headdim), as many as
    the longest sequence has."""
    check_indices(function, "block_table", table, 2)
    if v.shape[:2] != k.shape[:2]:
        expected = f"the {k.shape[0]} blocks of {k.shape[1]} that the keys have"
        raise wrong(ValueError, function, "v", expected, str(list(v.shape)))
    size = k.shape[1]
    longest = max(lengths, default=0)
    blocks = -(-longest // size) if size else 0
    shape = list(table.shape)
    if len(shape) != 2 or shape[0] != len(lengths) or shape[1] < blocks:
        expected = (
            f"shape ({len(lengths)}, {blocks}), batch_size and the blocks of {size} for the "
            f"{longest} keys of the longest sequence, or with more columns"
        )
        raise wrong(ValueError, function, "block_table", expected, str(shape))
    table = table[:, :blocks]
    if readable(table) and table.numel():
        first = torch.arange(blocks) * size
        outside = (table < 0) | (table >= k.shape[0])
        outside &= first < torch.tensor(lengths)[:, None]
        if outside.any():
            expected = f"0..{k.shape[0] - 1} where a sequence has keys"
            got = str(table[outside][0].item())
            raise wrong(ValueError, function, "block_table", expected, got)
    # Entries behind a sequence are often -1.
    table = table.clamp(0, max(k.shape[0] - 1, 0))
    return k[table].flatten(1, 2), v[table].flatten(1, 2)


def with_gaps(
    query_ends: list[int], used: Sequence[int], key_ends: list[int]
) -> tuple[list[int], list[int]]:
    """Prefix sums of sequences that use the first of their keys. What follows them is a sequence of
    its own, without queries, so that nothing is copied."""
    begins = [0, *key_ends[:-1]]
    spans = zip(begins, used, key_ends, strict=False)  # the operator compares their numbers
    return (
        [end for end in query_ends for _ in range(2)],
        [x for begin, length, end in spans for x in (begin + length, end)],
    )


def multiples(length: int, count: int) -> list[int]:
    """The prefix sums of `count` sequences of one length."""
    return [length * (i + 1) for i in range(count)]


def closed(
    q: Tensor, k: Tensor, q_ends: list[int], k_ends: list[int]
) -> tuple[list[int], list[int]]:
    """With the 0 that CANN wants where queries and keys have tokens behind the last sequence."""
    if q.shape[0] > q_ends[-1] and k.shape[0] > k_ends[-1]:
        return [*q_ends, 0], [*k_ends, 0]
    return q_ends, k_ends


def attend(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    slopes: Tensor | None,
    scale: float | None,
    dropout_p: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out (batch_size, seqlen_q, nheads, headdim) and lse (batch_size, nheads, seqlen_q)."""
    if slopes is not None and q.shape[0] and q.shape[1] != k.shape[1]:
        batch, queries, _, _ = q.shape
        # Outside of TND, the operator wants as many queries as keys.
        out, lse = attend_packed(
            function, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            multiples(queries, batch), multiples(k.shape[1], batch),
            mask, slopes, scale, dropout_p, return_lse,
        )  # fmt: skip
        return out.unflatten(0, (batch, queries)), by_batch(lse, batch)
    out, maximum, total = flash_attention_score(
        q, k, v, num_heads=q.shape[2], layout="BSND", pse_shift=slopes,
        pse_type=1 if slopes is None else 2, scale_value=scale, dropout_p=dropout_p,
        sparse_mode=mask.sparse_mode, pre_tokens=mask.pre_tokens, next_tokens=mask.next_tokens,
    )  # fmt: skip
    return out, log_sum_exp(maximum, total) if return_lse else None


def by_batch(lse: Tensor | None, batch: int) -> Tensor | None:
    """(nheads, batch_size * seqlen_q) to (batch_size, nheads, seqlen_q)."""
    return None if lse is None else lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def attend_packed(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: list[int],
    k_ends: list[int],
    mask: Mask,
    slopes: Tensor | None,
    scale: float | None,
    dropout_p: float,
    return_lse: bool,
    used: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out (total_q, nheads, headdim) and lse (nheads, total_q). `used`: how many of its keys each
    sequence uses; None for all."""
    if used is not None:
        q_ends, k_ends = with_gaps(q_ends, used, k_ends)
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.repeat_interleave(2, 0)
    q_list, k_list = closed(q, k, q_ends, k_ends)
    pse, q_start, k_start = slopes, None, None
    if slopes is not None:
        lead, excess = _leads(function, q_ends, k_ends, mask)
        q_start, k_start = [max(lead, 0)], [max(-lead, 0)]
        if slopes.dim() == 2 and len(q_list) > len(q_ends):
            # The 0 that closes the lists counts as a sequence.
            pse = torch.cat((slopes, slopes[-1:]))
    out, maximum, total = flash_attention_score(
        q, k, v, num_heads=q.shape[1], layout="TND", pse_shift=pse,
        pse_type=1 if pse is None else 2, q_start_idx=q_start, kv_start_idx=k_start,
        actual_seq_lengths_query=q_list, actual_seq_lengths_key=k_list, scale_value=scale,
        dropout_p=dropout_p, sparse_mode=mask.sparse_mode, pre_tokens=mask.pre_tokens,
        next_tokens=mask.next_tokens,
    )  # fmt: skip
    if not return_lse:
        return out, None
    lse = packed_log_sum_exp(maximum, total, q_ends)
    if slopes is not None and any(excess):
        rows = slopes.to(lse.dtype).expand(len(q_ends), -1)
        for begin, end, more, row in zip([0, *q_ends[:-1]], q_ends, excess, rows, strict=True):
            lse[:, begin:end] += more * row[:, None]
    return out, lse


def _leads(
    function: str, q_ends: list[int], k_ends: list[int], mask: Mask
) -> tuple[int, list[int]]:
    """How many keys come before the first query, seqlen_k - seqlen_q. The operator takes one number
    for all sequences: the largest, and by how much it exceeds that of each sequence.

    Where no key comes after its query, a larger number adds the same to all scores of a row.
    """
    lengths = list(zip(lengths_of(q_ends), lengths_of(k_ends), strict=False))
    leads = [keys - queries for queries, keys in lengths if queries and keys]
    lead = max(leads, default=0)
    if min(leads, default=0) != lead and not mask.looks_back:
        refuse(
            function, "alibi_slopes",
            "causal attention, or one seqlen_k - seqlen_q for all sequences",
            shown(sorted(set(leads))),
        )  # fmt: skip
    return lead, [lead - (keys - queries) for queries, keys in lengths]


def log_sum_exp(maximum: Tensor, total: Tensor) -> Tensor:
    """+inf in rows that see no key, as flash-attn has it. The operator has FLT_MAX there, negative
    as the maximum and positive as the sum, or without any keys zeros."""
    lse = maximum[..., 0] + total[..., 0].log()
    return lse.masked_fill(lse <= -_FLT_MAX, torch.inf)


def packed_log_sum_exp(maximum: Tensor, total: Tensor, ends: list[int]) -> Tensor:
    """(nheads, total_q), from statistics that hold (nheads, length) of one sequence after another.

    Tokens behind the last sequence see no key.
    """
    tokens, heads, _ = maximum.shape
    flat = log_sum_exp(maximum, total).flatten()
    lengths = [*lengths_of(ends), tokens - ends[-1]]
    parts = flat.split([heads * length for length in lengths])
    rows = [part.view(heads, length) for part, length in zip(parts, lengths, strict=True)]
    rows[-1] = rows[-1].new_full(rows[-1].shape, torch.inf)
    return torch.cat(rows, 1)


def packed_statistics(lse: Tensor, ends: list[int]) -> tuple[Tensor, Tensor]:
    """Statistics for the backward, which weighs with exp(score - maximum) / sum."""
    heads, tokens = lse.shape
    no_key = lse == torch.inf
    maximum = lse.masked_fill(no_key, -_FLT_MAX)
    total = torch.ones_like(lse).masked_fill(no_key, _FLT_MAX)
    lengths = [*lengths_of(ends), tokens - ends[-1]]

    def in_the_order_of_statistics(x: Tensor) -> Tensor:
        flat = torch.cat([part.flatten() for part in x.split(lengths, 1)])
        return flat.view(tokens, heads, 1).expand(-1, -1, _LANES).contiguous()

    return in_the_order_of_statistics(maximum), in_the_order_of_statistics(total)
