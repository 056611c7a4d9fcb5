"""Bounds on the results of lightning_indexer and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    OF_TERMS,
    VANISHING,
    Expected,
    counted_signs,
    magnitude,
    wide,
    within,
)
from ascend_attn_ops.reference.call import Outputs, Sample
from ascend_attn_ops.reference.sequences import (
    index_lists,
    leading_indices,
    rows,
    selection_to_tokens,
    to_tokens,
    until_padding,
)


def expected_gradient(sample: Sample) -> list[Expected]:
    names, dtype = ("d_query", "d_key", "d_weights"), sample.inputs["query"].dtype
    exact = sample.double().call(reference)
    return [
        within(name, x, terms, dtype)
        for name, x, terms in zip(names, exact, gradient_terms(sample), strict=True)
    ]


def gradient_terms(sample: Sample) -> Outputs:
    """A of the three gradients."""
    dtype, a = sample.inputs["query"].dtype, sample.exact_arguments()
    q, k, w = (to_tokens(x, a.layout) for x in (a.query, a.key.squeeze(-2), a.weights))
    d_y = magnitude(selection_to_tokens(a.d_values, a.layout))
    selected = index_lists(a.sparse_indices, a.layout)
    d_q, d_k, d_w = (torch.zeros_like(x) for x in (q, k, w))
    for row in rows(a):
        i = row.token
        leading = until_padding(leading_indices(selected[i], row, row.keys))
        j = row.first_key + torch.tensor(leading, dtype=torch.long)
        d = d_y[i, : len(j)]
        r = magnitude(q[i]) @ magnitude(k[j]).T
        d_s = d * magnitude(w[i])[:, None] * counted_signs(q[i] @ k[j].T, r, dtype)
        d_w[i] = (r * d).sum(-1)
        d_q[i] = d_s @ magnitude(k[j])
        d_k.index_add_(0, j, d_s.T @ magnitude(q[i]))
    return d_q.view(a.query.shape), d_k.view(a.key.shape), d_w.view(a.weights.shape)


def all_scores(sample: Sample) -> Tensor:
    """(..., 1, keys): the fp64 score of every key, -inf where the query may not see it."""
    exact = sample.double()
    keys = sample.inputs["key"].shape[-3]
    if (table := sample.options.get("block_table")) is not None:
        keys *= table.shape[-1]
    indices, values = exact.replace(sparse_count=keys, return_values=True).call(reference)
    # One column more takes the padding.
    scores = values.new_full((*values.shape[:-1], keys + 1), -torch.inf)
    columns = torch.where(indices < 0, keys, indices).long()
    return scores.scatter(-1, columns, values)[..., :keys]


def assert_best(indices: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """Check the K best of each row's keys, by scores that may be off by so much; -inf: no key.

    Returns:
        The columns of the selected keys, one behind the last for padding.
    """
    k, keys = indices.shape[-1], scores.shape[-1]
    counts = scores.isfinite().sum(-1, keepdim=True).clamp(max=k)
    slots = torch.arange(k).expand(indices.shape)
    assert torch.equal(indices >= 0, slots < counts), "the padding is not where it belongs"
    columns = torch.where(indices < 0, keys, indices).long()
    times = torch.zeros(*scores.shape[:-1], keys + 1).scatter_add(
        -1, columns, torch.ones(columns.shape)
    )[..., :keys]
    assert times.amax() <= 1 if times.numel() else True, "a key is selected twice"
    chosen = times > 0
    assert scores[chosen].isfinite().all(), "a key is selected that the query may not see"
    lowest = torch.where(chosen, scores + allowed, torch.inf)
    highest = torch.where(chosen, -torch.inf, scores - allowed)
    if keys > 0:
        assert (highest.amax(-1) <= lowest.amin(-1)).all(), "a higher score is left out"
    return columns


def assert_same_selection(sample: Sample, outputs: Outputs) -> None:
    """Sets of keys are compared, since rounding may exchange keys of nearly the same score."""
    indices, values = outputs
    scores = all_scores(sample)
    # The scores are accumulated in fp32 for the half-precision dtypes too.
    terms = all_scores(sample.map(lambda x: x.abs() if x.is_floating_point() else x))
    allowed = OF_TERMS[wide(sample.inputs["query"].dtype)] * magnitude(terms) + VANISHING
    columns = assert_best(indices, scores, allowed)
    if not sample.options["return_values"]:
        assert values.shape == (0,)
        return
    assert (values[indices < 0] == -torch.inf).all()

    def chosen_of(x: Tensor, padding: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, 1), value=padding).gather(-1, columns)

    Expected("values", chosen_of(scores, -torch.inf), chosen_of(allowed, 0)).check(values)
    assert not (values[..., 1:] > values[..., :-1]).any(), "the values are not descending"
