"""SparseLightningIndexerGradKLLoss, the indexer's loss and its gradients:
docs/operators/sparse_lightning_indexer_grad_kl_loss.md."""

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
    statistics_to_tokens,
    to_tokens,
)
from .sparse_flash_attention import join_rope


@reference
@torch.no_grad()
def sparse_lightning_indexer_grad_kl_loss(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL(p || y) between attention, averaged over its heads, and the indexer, and its gradients.

    With j the n = min(K, limit) leading indices of a row, -1 left out:

        s = scale_value * (query @ key[j]^T + query_rope @ key_rope[j]^T)
        p = (exp(s - softmax_max) / softmax_sum).mean(heads)
        S = query_index @ key_index[j]^T;  r = relu(S);  y = softmax((weights * r).sum(heads))
        loss += c * (p * (log p - log y)).sum()    both clamped to at least 1e-8
        d     = c * (y - p)

        d_weights         = (r * d).sum(keys)
        dS                = d * weights * (S > 0)
        d_query_index     = dS @ key_index[j]
        d_key_index[j]   += dS^T @ query_index

    c is the token's `token_weight`, 1 without one; where it is 0, the row is not read. The loss is
    the sum over all tokens. Its gradients are stated, not derived: y - p also where the clamp acts
    and where p does not sum to one.

    Returns d_query_index, d_key_index and d_weights with the shapes and dtypes of what they belong
    to, and loss (1,), fp32, or fp64 for fp64 inputs.
    """
    dtype = compute_dtype(a.query)
    q = to_tokens(join_rope(a.query, a.query_rope), a.layout, dtype)
    k = to_tokens(join_rope(a.key, a.key_rope).squeeze(-2), a.layout, dtype)
    q_index, w = (to_tokens(x, a.layout, dtype) for x in (a.query_index, a.weights))
    k_index = to_tokens(a.key_index.squeeze(-2), a.layout, dtype)
    maximum, total = (
        statistics_to_tokens(x, a.layout, dtype)[..., None] for x in (a.softmax_max, a.softmax_sum)
    )
    factors = (
        None if a.token_weight is None else to_tokens(a.token_weight, a.layout, dtype).tolist()
    )
    selected = index_lists(a.sparse_indices, a.layout)
    d_q, d_k, d_w = (torch.zeros_like(x) for x in (q_index, k_index, w))
    loss = q.new_zeros(1)

    for row in rows(a):
        i = row.token
        factor = 1.0 if factors is None else factors[i]
        kept = [index for index in leading_indices(selected[i], row, row.keys) if index != -1]
        if not kept or factor == 0:
            continue
        j = row.first_key + torch.tensor(kept, device=q.device)
        s = a.scale_value * (q[i] @ k[j].T)
        # No weight is above 1: a maximum that was rounded may be below its score.
        p = (torch.exp((s - maximum[i]).clamp(max=0)) / total[i]).mean(0)
        s_index = q_index[i] @ k_index[j].T
        r = torch.relu(s_index)
        y = torch.softmax(w[i] @ r, -1)
        p_clamped, y_clamped = p.clamp(min=1e-8), y.clamp(min=1e-8)
        loss += factor * (p_clamped * (p_clamped.log() - y_clamped.log())).sum()

        d = factor * (y - p)
        d_s = d * w[i, :, None] * (s_index > 0)
        d_w[i] = (r * d).sum(-1)
        d_q[i] = d_s @ k_index[j]
        d_k.index_add_(0, j, d_s.T @ q_index[i])

    return like(d_q, a.query_index), like(d_k, a.key_index), like(d_w, a.weights), loss
