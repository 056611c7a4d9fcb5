"""SparseFlashMla and its gradient: docs/operators/sparse_flash_mla.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import (
    causal_limit,
    compute_dtype,
    index_lists,
    like,
    spans,
    statistics_from_tokens,
    statistics_to_tokens,
    to_tokens,
)


class Keys(NamedTuple):
    """The keys of one query token, among all original and all compressed keys."""

    token: int
    window: list[int]
    compressed: list[int]
    slots: list[int]  # of `compressed`, in the token's row of indices


@reference
def sparse_flash_mla(a: Arguments) -> tuple[Tensor, Tensor]:
    """One softmax over the window, the compressed keys and the sink, which has no value.

        s   = scale_value * query @ kv^T          kv: the rows of W(i) and C(i)
        lse = log(exp(sink) + sum(exp(s)))
        out = exp(s - lse) @ kv

    A row without keys is zero, and so is its lse. Differentiable by plain autograd.

    Returns out (query's shape and dtype) and softmax_lse, (B,1,S1,N1) or (1,T1,N1), fp32, or fp64
    for fp64 inputs; empty without `return_softmax_lse`.
    """
    dtype = compute_dtype(a.query)
    q = to_tokens(a.query, a.layout, dtype)
    ori, cmp = _key_rows(a, dtype)
    out = torch.zeros_like(q)
    softmax_lse = q.new_zeros(q.shape[:2])
    for keys in visible(a):
        if keys.window or keys.compressed:
            i = keys.token
            kv = torch.cat((ori[keys.window], cmp[keys.compressed]))
            s = a.scale_value * (q[i] @ kv.T)
            logits = s if a.sink is None else torch.cat((s, a.sink.to(dtype)[:, None]), -1)
            weights = torch.softmax(logits, -1)[:, : len(kv)]
            out[i] = weights @ kv
            softmax_lse[i] = torch.logsumexp(logits, -1)
    return (
        out.view(a.query.shape).to(a.query.dtype),
        statistics_from_tokens(softmax_lse, a.query)
        if a.return_softmax_lse
        else softmax_lse.new_empty(0),
    )


@reference
@torch.no_grad()
def sparse_flash_mla_grad(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `sparse_flash_mla`, from its output and its lse.

        P  = exp(s - lse);  dP = d_out @ kv^T;  delta = (d_out * out).sum(-1)
        dS = P * (dP - delta + d_softmax_lse)
        d_query  = scale_value * dS @ kv
        d_kv    += scale_value * dS^T @ query + P^T @ d_out
        d_sink  += exp(sink - lse) * (d_softmax_lse - (P * dP).sum(-1))
        cmp_softmax_l1_norm[slot] = P.mean(heads)

    Returns d_query, d_ori_kv, d_cmp_kv, d_sink and cmp_softmax_l1_norm; (0,) for what the call has
    no argument for.
    """
    dtype = compute_dtype(a.query)
    d_out = torch.zeros_like(a.out) if a.d_out is None else a.d_out
    q, d_o, o = (to_tokens(x, a.layout, dtype) for x in (a.query, d_out, a.out))
    lse = statistics_to_tokens(a.softmax_lse, a.layout, dtype)
    d_lse = torch.zeros_like(lse)
    if a.d_softmax_lse is not None:
        d_lse = statistics_to_tokens(a.d_softmax_lse, a.layout, dtype)
    ori, cmp = _key_rows(a, dtype)
    d_q, d_ori, d_cmp = (torch.zeros_like(x) for x in (q, ori, cmp))
    sink = None if a.sink is None else a.sink.to(dtype)
    d_sink = q.new_zeros(0 if sink is None else len(sink))
    selects = a.cmp_sparse_indices is not None
    mass = q.new_zeros((len(q), a.cmp_sparse_indices.shape[-1]) if selects else (0,))
    for keys in visible(a):
        if not keys.window and not keys.compressed:
            continue
        i = keys.token
        kv = torch.cat((ori[keys.window], cmp[keys.compressed]))
        # No weight is above 1: an lse that was rounded may be below its score.
        p = torch.exp((a.scale_value * (q[i] @ kv.T) - lse[i, :, None]).clamp(max=0))
        d_p = d_o[i] @ kv.T
        d_s = p * (d_p - ((d_o[i] * o[i]).sum(-1) - d_lse[i])[:, None])
        d_q[i] = a.scale_value * (d_s @ kv)
        d_kv = a.scale_value * (d_s.T @ q[i]) + p.T @ d_o[i]
        of_window, of_compressed = d_kv.split([len(keys.window), len(keys.compressed)])
        d_ori.index_add_(0, torch.tensor(keys.window, dtype=torch.long), of_window)
        d_cmp.index_add_(0, torch.tensor(keys.compressed, dtype=torch.long), of_compressed)
        if sink is not None:
            d_sink += torch.exp((sink - lse[i]).clamp(max=0)) * (d_lse[i] - (p * d_p).sum(-1))
        if selects:
            mass[i, keys.slots] = p[:, len(keys.window) :].mean(0)
    return (
        like(d_q, a.query),
        like(d_ori, a.ori_kv),
        a.query.new_empty(0) if a.cmp_kv is None else like(d_cmp, a.cmp_kv),
        d_sink,
        mass.view(a.cmp_sparse_indices.shape) if selects else mass,
    )


def visible(a: Arguments) -> Iterator[Keys]:
    """The keys of every query token that belongs to a sequence.

    Query i is aligned with the end of the original keys, own(i) = Lo - Lq + i. It sees the first
    `causal_limit` compressed keys in cmp_mask_mode 3, and all of them in 0.
    """
    ori_rows = _rows(a, "ori")
    cmp_rows = [range(0)] * len(ori_rows) if a.cmp_kv is None else _rows(a, "cmp")
    residuals = [None] * len(ori_rows)
    if a.cmp_kv is not None and a.cmp_residual_kv is not None:
        residuals = a.cmp_residual_kv.tolist()
    selected = None
    if a.cmp_sparse_indices is not None:
        selected = index_lists(a.cmp_sparse_indices, a.layout)
    for (first, lq), ori, cmp, residual in zip(
        spans(a.query, a.layout, a.actual_seq_lengths_query), ori_rows, cmp_rows, residuals,
        strict=True,
    ):  # fmt: skip
        lo, lc = len(ori), len(cmp)
        tokens = lo if residual is None else lc * a.cmp_ratio + residual
        for i in range(lq):
            own = lo - lq + i
            n = lc
            if a.cmp_mask_mode == 3 and a.cmp_kv is not None:
                n = min(causal_limit(tokens, lq, i, a.cmp_ratio), lc)
            if a.ori_mask_mode != 0 and own < 0:
                yield Keys(first + i, [], [], [])
                continue
            slots = list(range(n))
            chosen = slots
            if selected is not None:
                slots, chosen = _selected(selected[first + i], n, lc)
            window = [ori[j] for j in _window(a, own, lo)]
            yield Keys(first + i, window, [cmp[j] for j in chosen], slots)


def _window(a: Arguments, own: int, keys: int) -> range:
    begin, end = 0, keys
    if a.ori_mask_mode == 3:
        end = own + 1
    if a.ori_mask_mode == 4:
        begin = 0 if a.ori_win_left == -1 else max(own - a.ori_win_left, 0)
        end = keys if a.ori_win_right == -1 else min(own + a.ori_win_right + 1, keys)
    return range(begin, end)


def _selected(row: list[int], n: int, keys: int) -> tuple[list[int], list[int]]:
    """The slots that a row reads, and their keys."""
    for index in row:
        if not -1 <= index < keys:
            raise ValueError(f"cmp_sparse_indices: expected values in [-1, {keys}), got {index}")
    slots, chosen = [], []
    for slot, index in enumerate(row[:n]):
        if index == -1:
            break
        if index < n:
            slots.append(slot)
            chosen.append(index)
    return slots, chosen


def _rows(a: Arguments, part: str) -> Sequence[Sequence[int]]:
    """Where the keys of each sequence are among those of `_key_rows`."""
    keys, lengths = getattr(a, f"{part}_kv"), getattr(a, f"actual_seq_lengths_{part}_kv")
    if getattr(a, "layout_kv", None) != "PA_BSND":
        return [range(first, first + n) for first, n in spans(keys, a.layout, lengths)]
    size, tables = keys.shape[1], getattr(a, f"{part}_block_table").tolist()
    return [
        [table[j // size] * size + j % size for j in range(n)]
        for table, n in zip(tables, lengths, strict=True)
    ]


def _key_rows(a: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of both kinds of keys, (tokens, D)."""
    cmp = a.query.new_empty(0, 1, a.query.shape[-1]) if a.cmp_kv is None else a.cmp_kv
    rows = [x.flatten(0, -3).squeeze(-2).to(dtype) for x in (a.ori_kv, cmp)]
    return rows[0], rows[1]
