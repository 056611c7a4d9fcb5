"""SparseFlashAttention and its gradient: docs/operators/sparse_flash_attention.md."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import (
    Row,
    compute_dtype,
    index_lists,
    leading_indices,
    like,
    rows,
    statistics_from_tokens,
    statistics_to_tokens,
    to_tokens,
    until_padding,
    with_dense_keys,
)


@reference
def sparse_flash_attention(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query over the keys it selects; every query head shares the one key head.

        s   = scale_value * (query @ key[pos]^T + query_rope @ key_rope[pos]^T)
        max = s.max(-1);  sum = exp(s - max).sum(-1)
        out = (exp(s - max) / sum) @ value[pos]

    pos are the keys of the row's blocks, up to its first -1 and not beyond `limit`; a key selected
    twice counts twice. A row that selects no key is zero, and so are its statistics.
    Differentiable by plain autograd; softmax_max counts as constant.

    Returns out (query's shape and dtype, value's D), and softmax_max and softmax_sum, (B,1,S1,G) or
    (1,T1,G), fp32, or fp64 for fp64 inputs; without `return_softmax_lse` these two are empty.
    """
    a = with_dense_keys(a, "key", "value", "key_rope")
    dtype = compute_dtype(a.query)
    q = to_tokens(join_rope(a.query, a.query_rope), a.layout, dtype)
    k = to_tokens(join_rope(a.key, a.key_rope).squeeze(-2), a.layout, dtype)
    v = to_tokens(a.value.squeeze(-2), a.layout, dtype)
    selected = index_lists(a.sparse_indices, a.layout)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    softmax_max, softmax_sum = (q.new_zeros(q.shape[:2]) for _ in range(2))

    for row in rows(a):
        i = row.token
        pos = positions(selected[i], row, row.capacity, a.sparse_block_size).to(q.device)
        if len(pos) > 0:
            s = a.scale_value * (q[i] @ k[pos].T)
            maximum = s.detach().amax(-1)
            e = torch.exp(s - maximum[:, None])
            out[i] = e / e.sum(-1, keepdim=True) @ v[pos]
            softmax_max[i], softmax_sum[i] = maximum, e.sum(-1)

    softmax_max, softmax_sum = (
        statistics_from_tokens(x, a.query) if a.return_softmax_lse else x.new_empty(0)
        for x in (softmax_max, softmax_sum)
    )
    return (
        out.view(*a.query.shape[:-1], v.shape[-1]).to(a.query.dtype),
        softmax_max,
        softmax_sum,
    )


@reference
@torch.no_grad()
def sparse_flash_attention_grad(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `sparse_flash_attention`, from its output and statistics.

        P  = exp(s - max) / sum;  dP = d_out @ value[pos]^T;  delta = (d_out * out).sum(-1)
        dS = P * (dP - delta + sum * d_softmax_sum)
        d_value[pos]    += P^T @ d_out
        d_query          = scale_value * dS @ key[pos]         and the rope parts alike
        d_key[pos]      += scale_value * dS^T @ query

    Returns d_query, d_key, d_value, d_query_rope, d_key_rope with the shapes and dtypes of what
    they belong to; without ropes the last two are empty tensors.
    """
    dtype = compute_dtype(a.query)
    q = to_tokens(join_rope(a.query, a.query_rope), a.layout, dtype)
    k = to_tokens(join_rope(a.key, a.key_rope).squeeze(-2), a.layout, dtype)
    v = to_tokens(a.value.squeeze(-2), a.layout, dtype)
    d_out = torch.zeros_like(a.out) if a.d_out is None else a.d_out
    o, d_o = (to_tokens(x, a.layout, dtype) for x in (a.out, d_out))
    maximum, total = (
        statistics_to_tokens(x, a.layout, dtype)[..., None] for x in (a.softmax_max, a.softmax_sum)
    )
    selected = index_lists(a.sparse_indices, a.layout)
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))

    for row in rows(a):
        i = row.token
        pos = positions(selected[i], row, row.keys, a.sparse_block_size).to(q.device)
        if len(pos) > 0:
            s = a.scale_value * (q[i] @ k[pos].T)
            # No weight is above 1: a maximum that was rounded may be below its score.
            p = torch.exp((s - maximum[i]).clamp(max=0)) / total[i]
            delta = (d_o[i] * o[i]).sum(-1, keepdim=True)
            if a.d_softmax_sum is not None:
                delta -= (
                    total[i] * statistics_to_tokens(a.d_softmax_sum, a.layout, dtype)[i, :, None]
                )
            d_s = p * (d_o[i] @ v[pos].T - delta)
            d_q[i] = a.scale_value * (d_s @ k[pos])
            d_k.index_add_(0, pos, a.scale_value * (d_s.T @ q[i]))
            d_v.index_add_(0, pos, p.T @ d_o[i])

    d_query, d_query_rope = split_rope(d_q, a.query, a.query_rope)
    d_key, d_key_rope = split_rope(d_k, a.key, a.key_rope)
    return d_query, d_key, like(d_v, a.value), d_query_rope, d_key_rope


def positions(indices: list[int], row: Row, selectable: int, sparse_block_size: int) -> Tensor:
    """The key tokens of the blocks that a row selects: the `pos` of its formulas."""
    blocks = until_padding(leading_indices(indices, row, selectable, sparse_block_size))
    keys = [
        row.first_key + key
        for block in blocks
        for key in range(block * sparse_block_size, min((block + 1) * sparse_block_size, row.limit))
    ]
    return torch.tensor(keys, dtype=torch.long)


def join_rope(x: Tensor, rope: Tensor | None) -> Tensor:
    """The sum of two products of rows is the product of the joined rows."""
    return x if rope is None else torch.cat((x, rope), -1)


def split_rope(gradient: Tensor, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
    d_x, d_rope = gradient.tensor_split([x.shape[-1]], -1)
    return like(d_x, x), x.new_empty(0) if rope is None else like(d_rope, rope)
