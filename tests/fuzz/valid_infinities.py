"""NaN and infinities in a few elements: docs/numerics.md, "Infinities and NaN".

Where the reference is finite, the operator is: what does not depend on an element is not changed by
it. Where the reference is not, an operator may leave out a product with a weight of zero. Only the
sparse attention has NaN wherever the reference has, but for the maximum of scores that are NaN:
there is none, and the sum says so. An infinite value is added in parts, whose sum may be NaN; and
so may be rows that share a tile with it, which threads decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from ascend_attn_check.samples import (
    flash_attention_score,
    lightning_indexer,
    prompt_flash_attention,
    randomness,
    sparse_flash_attention,
    sparse_flash_mla,
)
from ascend_attn_check.samples import sparse_lightning_indexer_grad_kl_loss as kl_loss
from ascend_attn_check.samples import sparse_lightning_indexer_kl_loss_grad as kl_loss_grad
from ascend_attn_ops.reference.bounds.expected import Expected
from support.samples import OPERATORS, Sample

from . import draw
from .calls import Outputs, check, run
from .case import Case
from .valid_dense import flash_case, prompt_case
from .valid_sparse import mla_case, mla_gradient_of, mla_with_lse, sparse_case, with_gradient

SOURCES = ("query", "key", "value", "query_rope", "key_rope")
MLA_SOURCES = ("query", "ori_kv", "cmp_kv", "sink")


def compare(
    sample: Sample, actual: Outputs, same_nan: tuple[str, ...] = (),
    bounds: Sequence[Expected] | None = None,
) -> None:  # fmt: skip
    """Compares; numbers of `same_nan` that are not finite in the reference must be equal."""
    expected = []
    bounds = bounds or OPERATORS[sample.operator].bounds.expected(sample)
    for one, x in zip(bounds, actual, strict=True):
        exact, allowed = (y.double().expand(x.shape) for y in (one.exact, one.allowed))
        if one.name not in same_nan:
            exact = torch.where(exact.isfinite(), exact, x.double())
        expected.append(replace(one, exact=exact, allowed=allowed))
    check(sample, actual, expected)


def case_of(
    draw_case: Callable[[Random], Any], build: Callable[[Any, torch.dtype], Sample],
    names: Callable[[Any], tuple[str, ...]] = lambda case: SOURCES,
    gradient_of: Callable[..., Sample] | None = None,
    expected: Callable[[Sample], Sequence[Expected]] | None = None,
    same_on_all_threads: Callable[[str], bool] = lambda name: False, same_nan: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """`names`: of the tensors, of which one is changed; threads may depend on which that is."""

    def infinities(random: Random) -> str:
        case, dtype = draw_case(random), random.choice(draw.DTYPES)
        if gradient_of and getattr(case, "pse", None) == "key" and case.b > 1:
            return "no such case"  # the gradient wants a bias for each batch
        sample, name = draw.with_special(build(case, dtype), names(case), random)
        sample = replace(sample, id=f"{sample.id} with special {name}")
        if gradient_of:
            sample = gradient_of(sample, randomness.Random(case.id, dtype))
        same = tuple(x for x in same_nan if x != "out" or name != "value")
        actual = run(sample, random, same_on_all_threads(name))
        compare(sample, actual, same, expected(sample) if expected else None)
        return name or "nothing to change"

    return infinities


def but_value(name: str) -> bool:
    return name != "value"


CASES: dict[str, Case] = {
    "valid/infinities/sparse_flash_attention": case_of(
        sparse_case, sparse_flash_attention.build, same_on_all_threads=lambda name: True,
        same_nan=("out", "softmax_sum"),
    ),
    "valid/infinities/sparse_flash_attention_grad": case_of(
        with_gradient, sparse_flash_attention.build, gradient_of=sparse_flash_attention.gradient_of
    ),
    "valid/infinities/flash_attention_score": case_of(
        flash_case, flash_attention_score.build,
        lambda case: (*SOURCES, "pse_shift") if case.pse_type < 2 else SOURCES,
        same_on_all_threads=but_value,
    ),
    "valid/infinities/flash_attention_score_grad": case_of(
        flash_case, flash_attention_score.build, gradient_of=flash_attention_score.gradient_of,
        expected=flash_attention_score.expected_gradient,
    ),
    "valid/infinities/prompt_flash_attention": case_of(
        partial(prompt_case, quantized=False), prompt_flash_attention.build,
        same_on_all_threads=but_value,
    ),
    "valid/infinities/lightning_indexer_grad": case_of(
        with_gradient, lightning_indexer.build_grad,
        lambda case: ("query", "key", "weights", "d_values"),
    ),
    "valid/infinities/sparse_flash_mla": case_of(
        mla_case, sparse_flash_mla.build, lambda case: MLA_SOURCES,
        same_on_all_threads=lambda name: not name.endswith("kv"),
    ),
    "valid/infinities/sparse_flash_mla_grad": case_of(
        mla_with_lse, sparse_flash_mla.build, lambda case: MLA_SOURCES, mla_gradient_of
    ),
    "valid/infinities/sparse_lightning_indexer_grad_kl_loss": case_of(
        lambda random: replace(
            sparse_case(random, loss=True, gradient=True), pattern="random"
        ),
        kl_loss.build, lambda case: (*SOURCES, "query_index", "key_index", "weights"),
    ),
    "valid/infinities/sparse_lightning_indexer_kl_loss_grad": case_of(
        lambda random: replace(with_gradient(random), block=1), kl_loss_grad.build,
        lambda case: ("query_index", "key_index", "weights"),
    ),
}  # fmt: skip
