"""The calls of flash-attn's functions: one operator call each, of batches, packs and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import readable, shown, wrong
from ascend_attn_ops._core.device_limits import device_in_force
from ascend_attn_ops._core.packing import (
    Lengths,
    ends_of,
    equal_ends,
    lengths_between,
    lengths_in,
    lengths_of,
    lengths_on,
    lengths_tensor,
)
from ascend_attn_ops._core.pages import check_indices, gather_keys_and_values
from ascend_attn_ops._core.statistics import by_head, log_sum_exp_or
from ascend_attn_ops.flash_attn._conventions import (
    WITHOUT_KEYS,
    Options,
    call,
    refuse,
    refuse_given,
)
from ascend_attn_ops.ops.flash_attention_score import flash_attention_score
from ascend_attn_ops.ops.fused_infer_attention_score import fused_infer_attention_score


class Pack(NamedTuple):
    """The cumulative lengths of packed sequences, without a leading 0."""

    q_ends: Lengths
    k_ends: Lengths
    parts: int = 1  # how many sequences of the operator make one of the caller's


def attend(
    options: Options, q: Tensor, k: Tensor, v: Tensor, used: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out (batch_size, seqlen_q, nheads, headdim) and lse (batch_size, nheads, seqlen_q). `used`:
    how many of its keys each sequence uses; None for all."""
    if options.slopes is not None and q.shape[0] and (used is not None or q.shape[1] != k.shape[1]):
        # Outside of TND, the operator wants as many queries as keys.
        return attend_in_rows(options, q, k, v, used)
    out, maximum, total = call(
        options, flash_attention_score, q, k, v, layout="BSND", pse_shift=options.slopes,
        pse_type=1 if options.slopes is None else 2, scale_value=options.scale,
        dropout_p=options.dropout_p, sink=options.sink, actual_seq_lengths_key=used,
        **options.mask.arguments(),
    )  # fmt: skip
    if not options.return_lse:
        return out, None
    return out, dense_log_sum_exp(maximum, total, options.sink)


def dense_log_sum_exp(maximum: Tensor, total: Tensor, sink: Tensor | None) -> Tensor:
    """(..., nheads, tokens), of statistics in this order."""
    lse = log_sum_exp_or(WITHOUT_KEYS, maximum[..., 0], total[..., 0])
    if sink is None:
        return lse
    # The operator's statistics of sequences without any key leave the sink out.
    own = sink.to(lse.dtype)[:, None]
    return lse.where((lse != WITHOUT_KEYS) | (own == -torch.inf), own)


def attend_in_rows(
    options: Options, q: Tensor, k: Tensor, v: Tensor, used: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As `attend`, by a pack."""
    batch, queries = q.shape[:2]
    q_ends = equal_ends(queries, batch)
    out, lse = attend_batches_packed(options, q.flatten(0, 1), k, v, q_ends, used)
    if lse is not None:
        lse = lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, queries)), lse


def is_for_inference(
    options: Options, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None
) -> bool:
    """Whether the operator for inference, which has no gradients, takes the call on all devices."""
    size = q.shape[-1]
    if size not in (64, 128) or size != v.shape[-1] or options.slopes is not None:
        return False
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    tensors = (q, k, v, options.sink)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return False
    if not torch.compiler.is_compiling():
        # Before CANN 9.0 it takes no sinks, and is missing on Ascend 950. A trace cannot ask.
        device = device_in_force()
        if device is not None and device.cann == "8.5":
            return False
    pages_fit = table is None or (k.shape[1] % 16 == 0 and 0 < k.shape[1] <= 1024)
    return pages_fit and options.dropout_p == 0


def infer(
    options: Options,
    layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    k_lengths: Tensor,
    q_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out, and lse with the heads before the tokens, of keys that are read where they are."""
    heads = k.shape[2]
    if table is not None:
        k, v = k.flatten(2), v.flatten(2)
    out, lse = call(
        options, fused_infer_attention_score, q, k, v, num_key_value_heads=heads, layout=layout,
        actual_seq_lengths_query=q_ends, actual_seq_lengths_key=k_lengths, block_table=table,
        sink=options.sink, scale_value=options.scale, return_softmax_lse=options.return_lse,
        **options.mask.arguments(),
    )  # fmt: skip
    if not options.return_lse:
        return out, None
    lse = lse[..., 0] if layout == "BSND" else lse[..., 0].T.contiguous()
    return out, lse.masked_fill(lse == -torch.inf, WITHOUT_KEYS)


def attend_sequences(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `attend_packed`, of the lengths that flash-attn takes. With a table and used_k,
    cu_seqlens_k may be None: they say where the keys are."""
    if table is None:
        pack = pack_of(options, cu_seqlens_q, cu_seqlens_k, used_q, used_k)
        return attend_packed(options, q, k, v, pack)
    refuse_given(options.function, seqused_q=used_q)
    q_ends = ends_of(options.function, options.lengths[0], cu_seqlens_q)
    if used_k is None:
        used_k = lengths_in(ends_of(options.function, options.lengths[1], cu_seqlens_k))
    else:
        check_indices(options.function, "seqused_k", used_k, 1)
        options = options._replace(lengths=(options.lengths[0], "seqused_k"))
    return attend_paged(options, q, k, v, q_ends, table, used_k)


def attend_paged(
    options: Options, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor | Sequence[int],
    table: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `attend_packed`, for keys and values in blocks, of which each sequence has `lengths`."""
    check_indices(options.function, "block_table", table, 2)
    batch, (of_queries, of_keys) = len(q_ends), options.lengths
    for name, count in (("block_table", table.shape[0]), (of_keys, lengths.shape[0])):
        if count != batch:
            expected = f"{batch} sequences, as {of_queries} has"
            raise wrong(ValueError, options.function, name, expected, str(count))
    if is_for_inference(options, q, k, v, table):
        # There, all queries belong to sequences: padding rows become one without keys.
        ends = lengths_tensor(q_ends)
        assert ends is not None
        ends = torch.cat((ends, ends.new_full((1,), q.shape[0])))
        lengths = torch.nn.functional.pad(lengths, (0, 1))
        table = torch.nn.functional.pad(table, (0, 0, 0, 1))
        out, lse = infer(options, "TND", q, k, v, table, lengths, ends)
        return out, lse if lse is None or options.sink is None else _padded(lse, q_ends)
    k, v = gather_keys_and_values(options.function, k, v, table, lengths)
    return attend_batches_packed(options, q, k, v, q_ends, lengths)


def attend_batches_packed(
    options: Options, q: Tensor, k: Tensor, v: Tensor, q_ends: Lengths, used: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """As `attend_packed`, for keys and values (batch_size, slots, nheads_k, headdim)."""
    batch, slots = k.shape[:2]
    k_ends = torch.arange(1, batch + 1, device="cpu") * slots
    pack = with_unused(options, Pack(q_ends, k_ends), None, used)
    return attend_packed(options, q, k.flatten(0, 1), v.flatten(0, 1), pack)


def attend_packed(
    options: Options, q: Tensor, k: Tensor, v: Tensor, pack: Pack
) -> tuple[Tensor, Tensor | None]:
    """out (total_q, nheads, headdim) and lse (nheads, total_q)."""
    prepared = packed_call(options, q, k, pack)
    out, maximum, total = call(
        options, flash_attention_score, q, k, v, dropout_p=options.dropout_p, sink=options.sink,
        parts=pack.parts, **prepared.keywords,
    )  # fmt: skip
    if not options.return_lse:
        return out, None
    lse = packed_log_sum_exp(maximum, total, pack.q_ends, options.sink)
    return out, prepared.shifted(lse, 1)


def pack_of(
    options: Options,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
) -> Pack:
    of_queries, of_keys = options.lengths
    q_ends = ends_of(options.function, of_queries, cu_seqlens_q)
    same = cu_seqlens_k is cu_seqlens_q
    pack = Pack(q_ends, q_ends if same else ends_of(options.function, of_keys, cu_seqlens_k))
    return with_unused(options, pack, used_q, used_k)


def with_unused(options: Options, pack: Pack, used_q: Tensor | None, used_k: Tensor | None) -> Pack:
    """Splits each sequence where only its first tokens are used, so that nothing is copied: the
    unused queries become a sequence without keys, and the unused keys one without queries."""
    if used_q is None and used_k is None:
        return pack
    queries, unused_queries = _split(options, "seqused_q", pack.q_ends, used_q)
    keys, unused_keys = _split(options, "seqused_k", pack.k_ends, used_k)
    q_parts, k_parts = [queries], [keys]
    if used_q is not None:
        q_parts.append(unused_queries)
        k_parts.append(torch.zeros_like(keys))
    if used_k is not None:
        q_parts.append(torch.zeros_like(queries))
        k_parts.append(unused_keys)
    q_ends, k_ends = (torch.stack(x, 1).flatten().cumsum(0) for x in (q_parts, k_parts))
    return Pack(q_ends, k_ends, len(q_parts))


def _split(
    options: Options, name: str, ends: Lengths, used: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How many tokens of each sequence are used and unused."""
    if used is None:
        lengths = lengths_in(ends)
        return lengths, torch.zeros_like(lengths)
    check_indices(options.function, name, used, 1)
    lengths = lengths_in(ends, used)
    if used.shape != lengths.shape:
        expected = f"shape ({lengths.shape[0]},)"
        raise wrong(ValueError, options.function, name, expected, str(list(used.shape)))
    outside = (used < 0) | (used > lengths)
    if readable(outside) and bool(outside.any()):
        at = int(outside.nonzero()[0])
        expected = f"0..{int(lengths[at])}, the length of sequence {at}"
        raise wrong(ValueError, options.function, name, expected, str(int(used[at])))
    return used.long(), lengths.long() - used


class PackedCall(NamedTuple):
    """The operator's keywords for a pack, forward and backward."""

    keywords: dict[str, Any]
    slopes: Tensor | None = None
    q_ends: list[int] = []  # noqa: RUF012 - never changed
    # Times its slopes, by how much the documented scores of a sequence exceed the operator's.
    excess: list[int] = []  # noqa: RUF012

    def shifted(self, lse: Tensor, sign: int) -> Tensor:
        """The log-sum-exp (nheads, total_q) of the documented scores from that of the operator's,
        for sign 1; for -1 the reverse."""
        if self.slopes is None or not any(self.excess) or self.slopes.shape[-1] != lse.shape[0]:
            return lse
        lse = lse.clone()
        rows = self.slopes.to(lse.dtype).expand(len(self.q_ends), -1)
        begins = [0, *self.q_ends[:-1]]
        for begin, end, more, row in zip(begins, self.q_ends, self.excess, rows, strict=True):
            lse[:, begin:end] += sign * more * row[:, None]
        return lse


def packed_call(options: Options, q: Tensor, k: Tensor, pack: Pack) -> PackedCall:
    keywords: dict[str, Any] = {
        "layout": "TND", "actual_seq_lengths_query": pack.q_ends,
        "actual_seq_lengths_key": pack.k_ends, "scale_value": options.scale,
        **options.mask.arguments(),
    }  # fmt: skip
    slopes = options.slopes
    if slopes is None:
        return PackedCall(keywords)
    # The first positions, which depend on all lengths, are numbers.
    q_ends, k_ends = (list(lengths_of(x) or ()) for x in (pack.q_ends, pack.k_ends))
    lead, excess = _leads(options, q_ends, k_ends)
    pse = slopes
    if slopes.dim() == 2:
        pse = slopes = slopes.repeat_interleave(pack.parts, 0)
        if all(x.shape[0] > max(ends, default=0) for x, ends in ((q, q_ends), (k, k_ends))):
            # The operator wants a 0 behind the lengths then, which counts as a sequence.
            pse = torch.cat((slopes, slopes[-1:]))
            keywords["actual_seq_lengths_query"] = [*q_ends, 0]
            keywords["actual_seq_lengths_key"] = [*k_ends, 0]
    keywords.update(
        pse_shift=pse, pse_type=2, q_start_idx=[max(lead, 0)], kv_start_idx=[max(-lead, 0)]
    )
    return PackedCall(keywords, slopes, q_ends, excess)


def _leads(options: Options, q_ends: list[int], k_ends: list[int]) -> tuple[int, list[int]]:
    """How many keys come before the first query, seqlen_k - seqlen_q. The operator takes one number
    for all sequences: the largest, and by how much it exceeds that of each sequence.

    Where no key comes after its query, a larger number adds the same to all scores of a row, but
    nothing to a sink.
    """
    lengths = list(zip(lengths_between(q_ends), lengths_between(k_ends), strict=False))
    leads = [keys - queries for queries, keys in lengths if queries and keys]
    lead = max(leads, default=0)
    moved = options.mask.looks_back and options.sink is None
    if min(leads, default=0) != lead and not moved:
        otherwise = "causal attention, or one" if options.sink is None else "beside a sink one"
        refuse(
            options.function, "alibi_slopes",
            f"{otherwise} seqlen_k - seqlen_q for all sequences", shown(sorted(set(leads))),
        )  # fmt: skip
    return lead, [lead - (keys - queries) for queries, keys in lengths]


def packed_log_sum_exp(
    maximum: Tensor, total: Tensor, ends: Lengths, sink: Tensor | None = None
) -> Tensor:
    """(nheads, total_q), where tokens after the last sequence see no key."""
    lse = dense_log_sum_exp(by_head(maximum[..., :1], ends), by_head(total[..., :1], ends), sink)
    return lse if sink is None else _padded(lse, ends)


def _padded(lse: Tensor, ends: Lengths) -> Tensor:
    """Padding rows have no sink."""
    on_device = lengths_on(ends, lse)
    assert on_device is not None
    row = torch.arange(lse.shape[1], device=lse.device)
    return lse.masked_fill(row >= on_device[-1:], WITHOUT_KEYS)
