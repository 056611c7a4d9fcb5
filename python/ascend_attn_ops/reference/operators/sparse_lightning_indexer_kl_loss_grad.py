"""SparseLightningIndexerKLLossGrad, the gradients of the loss of an indexer whose target is given:
docs/operators/sparse_lightning_indexer_kl_loss_grad.md."""

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
)


@reference
@torch.no_grad()
def sparse_lightning_indexer_kl_loss_grad(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of sum p * (log p - log y) between a target and the indexer.

    With j the n = min(K, limit) leading indices of a row, without -1 and without keys that the
    query does not see, and p the target at their slots:

        S = query_index @ key_index[j]^T;  r = relu(S);  y = softmax((weights * r).sum(heads))
        d = y * sum(p) - p

        d_weights         = (r * d).sum(keys)
        dS                = d * weights * (S > 0)
        d_query_index     = dS @ key_index[j]
        d_key_index[j]   += dS^T @ query_index

    Returns d_query_index, d_key_index and d_weights with the shapes and dtypes of what they belong
    to, and softmax_out: y in its slots, 0 elsewhere, as the target.
    """
    dtype = compute_dtype(a.query_index)
    a = Arguments(**vars(a), query=a.query_index, key=a.key_index)
    q, w = (to_tokens(x, a.layout, dtype) for x in (a.query, a.weights))
    k = to_tokens(a.key.squeeze(-2), a.layout, dtype)
    target = selection_to_tokens(a.attn_softmax_l1_norm, a.layout, dtype)
    selected = index_lists(a.sparse_indices, a.layout)
    d_q, d_k, d_w, softmax = (torch.zeros_like(x) for x in (q, k, w, target))

    for row in rows(a):
        i = row.token
        leading = leading_indices(selected[i], row, row.keys)
        slots = [slot for slot, index in enumerate(leading) if 0 <= index < row.limit]
        if not slots:
            continue
        j = row.first_key + torch.tensor([leading[slot] for slot in slots], device=q.device)
        p = target[i, slots]
        s = q[i] @ k[j].T
        r = torch.relu(s)
        y = torch.softmax(w[i] @ r, -1)
        softmax[i, slots] = y
        d = y * p.sum() - p
        d_s = d * w[i, :, None] * (s > 0)
        d_w[i] = (r * d).sum(-1)
        d_q[i] = d_s @ k[j]
        d_k.index_add_(0, j, d_s.T @ q[i])

    return (
        like(d_q, a.query),
        like(d_k, a.key),
        like(d_w, a.weights),
        softmax.view(a.sparse_indices.shape),
    )
