"""Bounds on the results of sparse_lightning_indexer_kl_loss_grad."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
    counted_signs,
    magnitude,
    wide,
    within,
)
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.sequences import (
    index_lists,
    leading_indices,
    rows,
    selection_to_tokens,
    to_tokens,
)


def expected(sample: Sample) -> list[Expected]:
    dtype = sample.inputs["query_index"].dtype
    results = sample.double().call(reference)
    of_results, largest = terms(sample, dtype)
    names = ("d_query_index", "d_key_index", "d_weights", "softmax_out")
    dtypes = (dtype, dtype, dtype, wide(dtype))
    return [within(*each, largest) for each in zip(names, results, of_results, dtypes, strict=True)]


def terms(sample: Sample, dtype: torch.dtype) -> tuple[list[Tensor], float]:
    """A of the four results, and the size of the indexer's largest score."""
    a = sample.exact_arguments()
    a = Arguments(**vars(a), query=a.query_index, key=a.key_index)
    q, k, w = (to_tokens(x, a.layout) for x in (a.query, a.key.squeeze(-2), a.weights))
    target = selection_to_tokens(a.attn_softmax_l1_norm, a.layout)
    selected = index_lists(a.sparse_indices, a.layout)
    d_q, d_k, d_w, softmax = (torch.zeros_like(x) for x in (q, k, w, target))
    largest = 0.0
    for row in rows(a):
        i = row.token
        leading = leading_indices(selected[i], row, row.keys)
        slots = [slot for slot, index in enumerate(leading) if 0 <= index < row.limit]
        if not slots:
            continue
        j = row.first_key + torch.tensor([leading[slot] for slot in slots])
        p = magnitude(target[i, slots])
        s = q[i] @ k[j].T
        y = torch.softmax(w[i] @ torch.relu(s), -1)
        r = magnitude(q[i]) @ magnitude(k[j]).T
        largest = max(largest, float((magnitude(w[i]) @ r).max()))
        softmax[i, slots] = y
        d = y * p.sum() + p
        d_s = d * magnitude(w[i])[:, None] * counted_signs(s, r, dtype)
        d_w[i] = (r * d).sum(-1)
        d_q[i] = d_s @ magnitude(k[j])
        d_k.index_add_(0, j, d_s.T @ magnitude(q[i]))
    shapes = a.query.shape, a.key.shape, a.weights.shape, a.sparse_indices.shape
    results = (d_q, d_k, d_w, softmax)
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)], largest
