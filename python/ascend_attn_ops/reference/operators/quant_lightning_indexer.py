"""QuantLightningIndexer: docs/operators/quant_lightning_indexer.md."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declaration import Arguments, reference
from ..sequences import compute_dtype, rows, to_tokens, with_dense_keys


@reference
def quant_lightning_indexer(a: Arguments) -> Tensor:
    """The `sparse_count` keys with the highest scores for each query, descending, and then -1:

        I[i, s] = key_dequant_scale[s] * sum_h c[i, h] * relu(query[i, h] . key[s])
        c[i, h] = weights[i, h] * query_dequant_scale[i, h]

    over the keys s < limit that query i may see. The products of int8 numbers are exact. The lower
    index of equal scores comes first.

    Returns sparse_indices (B,S1,1,K) or (T1,1,K), int32.
    """
    scores = key_scores(a)
    # A stable sort keeps equal scores in the order of their indices.
    ordered, order = scores.sort(descending=True, stable=True)
    best = torch.where(ordered == -torch.inf, -1, order)[:, : a.sparse_count].int()
    padded = torch.nn.functional.pad(best, (0, a.sparse_count - best.shape[-1]), value=-1)
    return padded.view(*a.query.shape[:-2], 1, a.sparse_count)


def key_scores(a: Arguments) -> Tensor:
    """(tokens, keys of the longest sequence): -inf for keys that a query does not see."""
    a = with_dense_keys(a, "key", "key_dequant_scale")
    dtype = compute_dtype(a.weights)
    q, k, ks = (
        to_tokens(x, a.layout, dtype)
        for x in (a.query, a.key.squeeze(-2), a.key_dequant_scale.squeeze(-1))
    )
    c = to_tokens(a.weights, a.layout, dtype) * to_tokens(a.query_dequant_scale, a.layout, dtype)
    of_queries = list(rows(a))
    scores = c.new_full((len(q), max((row.limit for row in of_queries), default=0)), -torch.inf)
    for row in of_queries:
        visible = slice(row.first_key, row.first_key + row.limit)
        products = torch.relu(q[row.token] @ k[visible].T)
        scores[row.token, : row.limit] = ks[visible] * (c[row.token] @ products)
    return scores
