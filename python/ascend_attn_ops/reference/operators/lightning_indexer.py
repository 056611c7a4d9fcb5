"""LightningIndexer and its gradient: docs/operators/lightning_indexer.md."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import (
    compute_dtype,
    index_lists,
    leading_indices,
    like,
    rows,
    selection_to_tokens,
    to_tokens,
    until_padding,
    with_dense_keys,
)


@reference
def lightning_indexer(a: Arguments) -> tuple[Tensor, Tensor]:
    """The `sparse_count` keys with the highest scores for each query, descending:

        I[i, s] = sum_h weights[i, h] * relu(query[i, h] . key[s])

    over the keys s < limit that query i may see. The rest of a row is -1, with value -inf. The
    lower index of equal scores comes first. Differentiable through `sparse_values` by plain
    autograd.

    Returns sparse_indices (B,S1,1,K) or (T1,1,K), int32, and sparse_values, the same shape in the
    dtype of query, or with cmp_ratio above 1 in float32, float64 for float64 inputs; without
    `return_values` the values are an empty tensor.
    """
    a = with_dense_keys(a, "key")
    dtype = compute_dtype(a.query)
    q, k, w = (to_tokens(x, a.layout, dtype) for x in (a.query, a.key.squeeze(-2), a.weights))
    indices = torch.full((len(q), a.sparse_count), -1, dtype=torch.int32, device=q.device)
    values = torch.full((len(q), a.sparse_count), -torch.inf, dtype=dtype, device=q.device)

    for row in rows(a):
        i, visible = row.token, k[row.first_key : row.first_key + row.limit]
        scores = w[i] @ torch.relu(q[i] @ visible.T)
        # A stable sort keeps equal scores in the order of their indices.
        ordered, order = scores.sort(descending=True, stable=True)
        n = min(a.sparse_count, row.limit)
        indices[i, :n] = order[:n].int()
        values[i, :n] = ordered[:n]

    shape = (*a.query.shape[:-2], 1, a.sparse_count)
    kept = values.view(shape) if a.return_values else values.new_empty(0)
    return indices.view(shape), kept.to(a.query.dtype if a.cmp_ratio == 1 else dtype)


@reference
@torch.no_grad()
def lightning_indexer_grad(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `lightning_indexer` through its values.

    With j the n = min(K, limit) leading indices of a row, up to the first -1, S = query @ key[j]^T
    and r = relu(S):

        d_weights = (r * d_values).sum(keys)
        dS        = d_values * weights * (S > 0)
        d_query   = dS @ key[j]
        d_key[j] += dS^T @ query

    Returns d_query, d_key and d_weights with the shapes and dtypes of query, key and weights.
    """
    dtype = compute_dtype(a.query)
    q, k, w = (to_tokens(x, a.layout, dtype) for x in (a.query, a.key.squeeze(-2), a.weights))
    d_y = selection_to_tokens(a.d_values, a.layout, dtype)
    selected = index_lists(a.sparse_indices, a.layout)
    d_q, d_k, d_w = (torch.zeros_like(x) for x in (q, k, w))

    for row in rows(a):
        i = row.token
        leading = until_padding(leading_indices(selected[i], row, row.keys))
        j = row.first_key + torch.tensor(leading, dtype=torch.long, device=q.device)
        d_y_i = d_y[i, : len(j)]
        s = q[i] @ k[j].T
        d_s = d_y_i * w[i, :, None] * (s > 0)
        d_w[i] = (torch.relu(s) * d_y_i).sum(-1)
        d_q[i] = d_s @ k[j]
        d_k.index_add_(0, j, d_s.T @ q[i])

    return like(d_q, a.query), like(d_k, a.key), like(d_w, a.weights)
