"""Bounds on the results of sparse_lightning_indexer_grad_kl_loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
    counted_signs,
    largest_score,
    magnitude,
    wide,
    within,
)
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.operators.sparse_flash_attention import join_rope
from ascend_attn_ops.reference.sequences import (
    index_lists,
    rows,
    statistics_to_tokens,
    to_tokens,
)


def expected(sample: Sample) -> list[Expected]:
    dtype = sample.inputs["query"].dtype
    d_query, d_key, d_weights, loss = sample.double().call(reference)
    (of_query, of_key, of_weights, of_sum), largest = terms(sample, dtype)
    return [
        within("d_query_index", d_query, of_query, dtype, largest),
        within("d_key_index", d_key, of_key, dtype, largest),
        within("d_weights", d_weights, of_weights, dtype, largest),
        within("loss", loss, of_sum, wide(dtype), largest),
    ]


def terms(sample: Sample, dtype: torch.dtype) -> tuple[list[Tensor], float]:
    """A of the four results, and the size of the largest score of either softmax."""
    a = sample.exact_arguments()
    query, key = (join_rope(a.query, a.query_rope), join_rope(a.key, a.key_rope))
    q, k, q_index, k_index, w = (
        to_tokens(x, a.layout)
        for x in (query, key.squeeze(-2), a.query_index, a.key_index.squeeze(-2), a.weights)
    )
    maximum, total = (
        statistics_to_tokens(x, a.layout, torch.float64)[..., None]
        for x in (a.softmax_max, a.softmax_sum)
    )
    factors = (
        None if a.token_weight is None else to_tokens(a.token_weight, a.layout).double().tolist()
    )
    d_q, d_k, d_w = (torch.zeros_like(x) for x in (q_index, k_index, w))
    of_loss, largest = torch.zeros(1, dtype=torch.float64), largest_score(query, key, a.scale_value)
    selected = index_lists(a.sparse_indices, a.layout)
    for row in rows(a):
        i = row.token
        factor = 1.0 if factors is None else abs(factors[i])
        kept = [index for index in selected[i][: row.limit] if index != -1]
        if not kept or factor == 0:
            continue
        j = row.first_key + torch.tensor(kept)
        difference = a.scale_value * (q[i] @ k[j].T) - maximum[i]
        p = (torch.exp(difference.clamp(max=0)) / total[i]).mean(0)
        s = q_index[i] @ k_index[j].T
        y = torch.softmax(w[i] @ torch.relu(s), -1)
        r = magnitude(q_index[i]) @ magnitude(k_index[j]).T
        largest = max(largest, float((magnitude(w[i]) @ r).max()))
        logarithms = p.clamp(min=1e-8).log().abs() + y.clamp(min=1e-8).log().abs()
        of_loss += factor * (p.clamp(min=1e-8) * (logarithms + 1)).sum()
        d = factor * (y + p.abs())
        d_s = d * magnitude(w[i])[:, None] * counted_signs(s, r, dtype)
        d_w[i] = (r * d).sum(-1)
        d_q[i] = d_s @ magnitude(k_index[j])
        d_k.index_add_(0, j, d_s.T @ magnitude(q_index[i]))
    gradients = ((d_q, a.query_index), (d_k, a.key_index), (d_w, a.weights))
    return [*(x.reshape(like.shape) for x, like in gradients), of_loss], largest
