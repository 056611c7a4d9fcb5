"""Valid calls of the sparse operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.sequences import (
    index_lists,
    rows,
    statistics_to_tokens,
    to_tokens,
    with_dense_keys,
)
from ascend_attn_ops.reference.sparse_flash_attention import join_rope
from samples import Sample, lightning_indexer, randomness, sparse_flash_attention
from samples import sparse_lightning_indexer_grad_kl_loss as kl_loss
from samples.sparse import SparseCase
from torch import Tensor

from . import draw
from .bounds import Expected, check_all, largest_score, of_statistics, within
from .calls import Outputs, run
from .case import Case, Finding
from .memory import with_expanded

PATTERNS = ("random", "padded", "first", "hole", "duplicates", "future", "unread")
# Those that name keys behind the lengths of a batch, where the gradients take none.
_BEHIND = ("future", "unread")

# Not `future`: a row that attends to none of its keys has statistics of which no target comes.
LOSS_PATTERNS = (*(x for x in PATTERNS if x != "future"), "clamped", "partial")


@dataclass(frozen=True)
class Fuzzed(SparseCase):
    seed: int = 0

    @property
    def id(self) -> str:
        """Other numbers for every seed."""
        return f"{super().id}-{self.seed}"


def sparse_case(
    random: Random,
    patterns: tuple[str, ...] = PATTERNS,
    loss: bool = False,
    gradient: bool = False,
    paged: bool = False,
) -> Fuzzed:
    """`loss`: what the loss does not have is left out."""
    fields: dict[str, Any] = {"seed": random.getrandbits(32), "layout": "BSND"}
    large = random.random() < 0.1
    most = 140 if large else 16
    if random.random() < 0.4:
        fields["layout"] = "TND"
        count = random.randint(0, 2 if large else 4)
        fields["lengths"] = tuple(draw.lengths(random, count, most) for _ in range(2))
        fields["tail"] = random.choice(((0, 0), (0, 0), (2, 3), (0, 1), (1, 0)))
    else:
        b = random.choice((0, 1, 1, 1, 2, 2, 3)) if not large else 1
        s = draw.size(random, most), draw.size(random, most)
        fields |= {"b": b, "s": s}
        if random.random() < 0.4:
            fields["lengths"] = tuple(
                tuple(random.randint(0, s[side]) for _ in range(b)) for side in range(2)
            )
    if paged:
        if "lengths" not in fields:
            b, (s1, s2) = fields["b"], fields["s"]
            fields["lengths"] = (s1,) * b, tuple(random.randint(0, s2) for _ in range(b))
        # Patterns name keys that a batch has room for: here in the blocks of its longest sequence.
        fields["s"] = fields.get("s", (0, 0))[0], max(fields["lengths"][1], default=0)
        fields["page"] = random.choice((1, 2, 3, 7, 16, 16, 128))
    fields["heads"] = random.choice((1, 1, 2, 3, 4, 5, 8, 16, 17, 33) if not large else (1, 2, 3))
    fields["d"] = draw.head_size(random)
    fields["rope"] = random.choice((0, 0, 1, 5, 8, 16, 64))
    fields["k"] = max(1, draw.size(random, most))
    fields["mode"] = 3 if loss else random.choice((0, 3))
    if not loss:
        fields["block"] = random.choice((1, 1, 1, 2, 3, 8, 16, 64))
        fields["absorbed"] = random.random() < 0.3
    if gradient and "lengths" in fields:
        patterns = tuple(x for x in patterns if x not in _BEHIND)
    fields["pattern"] = random.choice(patterns)
    fields["selection_heads"] = random.random() < 0.8
    fields["index_heads"] = random.choice((1, 2, 3, 4, 8, 9, 16))
    fields["index_d"] = draw.head_size(random)
    return Fuzzed(**fields)


def expanded(case: SparseCase) -> tuple[str, ...]:
    """Tensors that may be one row many times: not caches, whose first rows may be unread."""
    return ("query",) if case.page else ("query", "key", "value", "key_rope")


def label(case: SparseCase, dtype: torch.dtype) -> str:
    pages = " paged" if case.page else ""
    return f"{case.layout}{pages} mode {case.mode} {draw.name_of(dtype)}"


def forward_of(random: Random, case: Fuzzed, dtype: torch.dtype) -> Sample:
    """A call of sparse_flash_attention, of values of all sizes."""
    sample = sparse_flash_attention.build(case, dtype)
    if random.random() < 0.2:
        sample = draw.with_zeros(sample, ("query", "key", "query_rope", "key_rope"), random)
    if not case.absorbed:
        sample = draw.scaled(sample, ("value",), random)
    sample = with_expanded(sample, (*expanded(case), "query_rope"), random)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def score_size(sample: Sample) -> float:
    optional = {"query_rope": None, "key_rope": None, "layout_key": None}
    a = with_dense_keys(Arguments(**{**optional, **sample.double().arguments}), "key", "key_rope")
    query, key = join_rope(a.query, a.query_rope), join_rope(a.key, a.key_rope)
    return largest_score(query, key, a.scale_value)


def attention(random: Random, paged: bool = False) -> str:
    case, dtype = sparse_case(random, paged=paged), random.choice(draw.DTYPES)
    sample = forward_of(random, case, dtype)
    actual = run(sample, random, same_on_all_threads=True)
    exact = sample.double()
    value = exact.inputs["value"]
    both = exact.replace(value=torch.cat((value, value.abs()), -1)).call(reference)
    out, terms = both[0].split(case.d, -1)
    largest = score_size(sample)
    expected = [within("out", out, terms, dtype, largest)]
    if not paged:
        expected += of_statistics(both[1], both[2], dtype, largest)
    check_all(expected, actual[: len(expected)], sample)
    return label(case, dtype)


def attention_gradient(random: Random) -> str:
    case, dtype = sparse_case(random, gradient=True), random.choice(draw.DTYPES)
    forward = forward_of(random, case, dtype)
    sample = sparse_flash_attention.gradient_of(forward, randomness.Random(case.id, dtype))
    sample = with_expanded(draw.scaled(sample, ("d_out",), random), ("d_out",), random)
    actual = run(sample, random, same_on_all_threads=False)
    largest = score_size(sample)
    names = ("d_query", "d_key", "d_value", "d_query_rope", "d_key_rope")
    exact = sample.double().call(reference)
    expected = [
        within(name, x, terms, dtype, largest)
        for name, x, terms in zip(names, exact, attention_terms(sample), strict=True)
    ]
    check_all(expected, actual, sample)
    return label(case, dtype)


def attention_terms(sample: Sample) -> Outputs:
    """A of the five gradients, by the reference: beside every query stand zeros and its absolute
    value, beside every key its absolute value and zeros. The scores are the same, and what the
    gradients' parts beside are is what the absolute values would have."""
    exact = sample.double()
    changes: dict[str, Any] = {
        "value": exact.inputs["value"].abs(),
        "d_out": exact.inputs["d_out"].abs(),
        "out": -exact.inputs["out"].abs(),
    }
    for name, x in exact.tensors.items():
        zeros = torch.zeros_like(x)
        if name in ("query", "query_rope"):
            changes[name] = torch.cat((x, zeros, x.abs()), -1)
        elif name in ("key", "key_rope"):
            changes[name] = torch.cat((x, x.abs(), zeros), -1)
    d_query, d_key, d_value, d_query_rope, d_key_rope = exact.replace(**changes).call(reference)

    def part(x: Tensor, number: int) -> Tensor:
        return x.abs().chunk(3, -1)[number] if x.dim() > 1 else x

    return part(d_query, 1), part(d_key, 2), d_value, part(d_query_rope, 1), part(d_key_rope, 2)


def indexer(random: Random, paged: bool = False) -> str:
    case, dtype = sparse_case(random, paged=paged), random.choice(draw.DTYPES)
    sample = draw.with_float32_weights(lightning_indexer.build(case, dtype), random)
    if random.random() < 0.3:
        sample = draw.with_zeros(sample, ("query", "key", "weights"), random)
    else:
        # No score may be more than float16 holds.
        sample = draw.scaled(sample, ("query", "key", "weights"), random, exponents=(-6, 1))
    sample = with_expanded(sample, (*expanded(case), "weights"), random)
    actual = run(sample, random, same_on_all_threads=True)
    try:
        lightning_indexer.assert_same_selection(sample, actual)
    except AssertionError as error:
        raise Finding(f"{sample.id}\n{error}") from None
    return label(case, dtype)


def indexer_gradient(random: Random) -> str:
    case, dtype = sparse_case(random, gradient=True), random.choice(draw.DTYPES)
    sample = draw.with_float32_weights(lightning_indexer.build_grad(case, dtype), random)
    names = ("query", "key", "weights", "d_values")
    sample = (
        draw.with_zeros(sample, names, random)
        if random.random() < 0.2
        else draw.scaled(sample, names, random)
    )
    actual = run(sample, random, same_on_all_threads=False)
    if has_undecided_scores(sample.inputs["query"], sample.inputs["key"]):
        return "undecided"
    exact = sample.double()
    absolute = exact.map(lambda x: x.abs() if x.is_floating_point() else x)
    expected = [
        within(name, x, terms, dtype)
        for name, x, terms in zip(
            ("d_query", "d_key", "d_weights"),
            exact.call(reference),
            absolute.call(reference),
            strict=True,
        )
    ]
    check_all(expected, actual, sample)
    return label(case, dtype)


def has_undecided_scores(query: Tensor, key: Tensor) -> bool:
    """Whether rounding decides the sign of a product, on which a whole gradient depends."""
    q, k = (x.double().reshape(-1, x.shape[-1]) for x in (query, key))
    scores, terms = q @ k.mT, q.abs() @ k.abs().mT
    return bool(((scores != 0) & (scores.abs() < 2e-6 * terms)).any())


def loss(random: Random) -> str:
    case = sparse_case(random, LOSS_PATTERNS, loss=True, gradient=True)
    if case.pattern == "partial" and case.layout == "TND":
        case = replace(case, pattern="clamped")
    dtype = random.choice(draw.DTYPES)
    sample = draw.with_float32_weights(kl_loss.build(case, dtype), random)
    tokens = sample.inputs["query"].shape[:-2]
    if random.random() < 0.3:
        generator = torch.Generator().manual_seed(case.seed)
        weight = torch.rand(tokens, generator=generator) * (
            torch.rand(tokens, generator=generator) < 0.7
        )
        kind = random.choice((torch.bool, torch.float32, dtype))
        sample = sample.given(weight=weight.to(kind))
    actual = run(sample, random, same_on_all_threads=False)
    if has_undecided_scores(sample.inputs["query_index"], sample.inputs["key_index"]):
        return "undecided"
    exact = sample.double().call(reference)
    terms, largest = loss_terms(sample)
    names = ("d_query_index", "d_key_index", "d_weights", "loss")
    expected = [
        within(name, x, a, torch.float64 if dtype == torch.float64 else kind, largest)
        for name, x, a, kind in zip(names, exact, terms, [dtype] * 3 + [torch.float32], strict=True)
    ]
    if dtype == torch.float32 and exact[2].numel():
        of_largest = Expected("d_weights", exact[2], 1e-3 * exact[2].abs().max())
        expected[2] = max(expected[2], of_largest, key=lambda x: float(x.allowed.max()))
    check_all(expected, actual, sample)
    return f"{label(case, dtype)}{' weighted' if 'weight' in sample.options else ''}"


def loss_terms(sample: Sample) -> tuple[list[Tensor], float]:
    """A of the four results, and the size of the largest score of either softmax."""
    a = Arguments(**{"weight": None, **sample.double().arguments})
    query, key = (join_rope(a.query, a.query_rope), join_rope(a.key, a.key_rope))
    q, k, q_index, k_index, w = (
        to_tokens(x, a.layout)
        for x in (query, key.squeeze(-2), a.query_index, a.key_index.squeeze(-2), a.weights)
    )
    maximum, total = (
        statistics_to_tokens(x, a.layout, torch.float64)[..., None]
        for x in (a.softmax_max, a.softmax_sum)
    )
    factors = None if a.weight is None else to_tokens(a.weight, a.layout).double().tolist()
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
        p = (torch.exp(a.scale_value * (q[i] @ k[j].T) - maximum[i]) / total[i]).mean(0)
        y = torch.softmax(w[i] @ torch.relu(q_index[i] @ k_index[j].T), -1)
        r = q_index[i].abs() @ k_index[j].abs().T
        largest = max(largest, float((w[i].abs() @ r).max()))
        logarithms = p.clamp(min=1e-8).log().abs() + y.clamp(min=1e-8).log().abs()
        of_loss += factor * (p.clamp(min=1e-8) * (logarithms + 1)).sum()
        d = factor * (y + p)
        d_s = d * w[i, :, None].abs()
        d_w[i] = (r * d).sum(-1)
        d_q[i] = d_s @ k_index[j].abs()
        d_k.index_add_(0, j, d_s.T @ q_index[i].abs())
    gradients = ((d_q, a.query_index), (d_k, a.key_index), (d_w, a.weights))
    return [*(x.reshape(like.shape) for x, like in gradients), of_loss], largest


CASES: dict[str, Case] = {
    "valid/lightning_indexer": indexer,
    "valid/paged/lightning_indexer": partial(indexer, paged=True),
    "valid/paged/sparse_flash_attention": partial(attention, paged=True),
    "valid/lightning_indexer_grad": indexer_gradient,
    "valid/sparse_flash_attention": attention,
    "valid/sparse_flash_attention_grad": attention_gradient,
    "valid/sparse_lightning_indexer_grad_kl_loss": loss,
}
