"""NaN and infinities in a few elements: docs/numerics.md, "Infinities and NaN".

Where the reference is finite, the operator is: what does not depend on an element is not changed by
it. Where the reference is not, an operator may leave out a product with a weight of zero. Only the
sparse attention has NaN wherever the reference has, but for the maximum of scores that are NaN:
there is none, and the sum says so. An infinite value is added in parts, whose sum may be NaN; and
so may be rows that share a tile with it, which threads decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from ascend_attn_ops.check.bounds import Expected
from ascend_attn_ops.check.samples import (
    flash_attention_score,
    lightning_indexer,
    prompt_flash_attention,
    randomness,
    sparse_flash_attention,
    sparse_flash_mla,
)
from ascend_attn_ops.check.samples import sparse_lightning_indexer_grad_kl_loss as kl_loss
from ascend_attn_ops.check.samples import sparse_lightning_indexer_kl_loss_grad as kl_loss_grad
from support.samples import OPERATORS, Sample

from . import draw
from .calls import Outputs, check, run
from .case import Case
from .valid_dense import flash_case, prompt_case
from .valid_mla import mla_case
from .valid_sparse import sparse_case

SOURCES = ("query", "key", "value", "query_rope", "key_rope")
MLA_SOURCES = ("query", "ori_kv", "cmp_kv", "sink")


def compare(
    sample: Sample,
    actual: Outputs,
    same_nan: tuple[str, ...] = (),
    bounds: Sequence[Expected] | None = None,
) -> None:
    """Compares; numbers of `same_nan` that are not finite in the reference must be equal."""
    expected = []
    bounds = bounds or OPERATORS[sample.operator].expected(sample)
    for one, x in zip(bounds, actual, strict=True):
        exact, allowed = (y.double().expand(x.shape) for y in (one.exact, one.allowed))
        if one.name not in same_nan:
            exact = torch.where(exact.isfinite(), exact, x.double())
        expected.append(replace(one, exact=exact, allowed=allowed))
    check(sample, actual, expected)


def with_special(sample: Sample, names: tuple[str, ...], random: Random) -> tuple[Sample, str]:
    sample, name = draw.with_special(sample, names, random)
    return replace(sample, id=f"{sample.id} with special {name}"), name or "nothing to change"


def checked(
    random: Random, sample: Sample, name: str, same_on_all_threads: bool = False, **options: Any
) -> str:
    compare(sample, run(sample, random, same_on_all_threads), **options)
    return name


def sparse(random: Random) -> str:
    case, dtype = sparse_case(random), random.choice(draw.DTYPES)
    sample, name = with_special(sparse_flash_attention.build(case, dtype), SOURCES, random)
    same_nan = ("softmax_sum",) if name == "value" else ("out", "softmax_sum")
    return checked(random, sample, name, True, same_nan=same_nan)


def sparse_gradient(random: Random) -> str:
    case, dtype = sparse_case(random, gradient=True), random.choice(draw.DTYPES)
    forward, name = with_special(sparse_flash_attention.build(case, dtype), SOURCES, random)
    sample = sparse_flash_attention.gradient_of(forward, randomness.Random(case.id, dtype))
    return checked(random, sample, name)


def dense(random: Random) -> str:
    case, dtype = flash_case(random), random.choice(draw.DTYPES)
    names = (*SOURCES, "pse_shift") if case.pse_type < 2 else SOURCES
    sample, name = with_special(flash_attention_score.build(case, dtype), names, random)
    return checked(random, sample, name, name != "value")


def dense_gradient(random: Random) -> str:
    case, dtype = flash_case(random), random.choice(draw.DTYPES)
    if case.pse == "key" and case.b > 1:  # the gradient wants a bias for each batch
        return "no such case"
    forward, name = with_special(flash_attention_score.build(case, dtype), SOURCES, random)
    sample = flash_attention_score.gradient_of(forward, randomness.Random(case.id, dtype))
    return checked(random, sample, name, bounds=flash_attention_score.expected_gradient(sample))


def prompt(random: Random) -> str:
    case, dtype = prompt_case(random, quantized=False), random.choice(draw.DTYPES)
    sample, name = with_special(prompt_flash_attention.build(case, dtype), SOURCES, random)
    return checked(random, sample, name, name != "value")


def indexer_gradient(random: Random) -> str:
    case, dtype = sparse_case(random, gradient=True), random.choice(draw.DTYPES)
    names = ("query", "key", "weights", "d_values")
    return checked(random, *with_special(lightning_indexer.build_grad(case, dtype), names, random))


def loss(random: Random) -> str:
    case = replace(sparse_case(random, loss=True, gradient=True), pattern="random")
    sample = kl_loss.build(case, random.choice(draw.DTYPES))
    names = (*SOURCES, "query_index", "key_index", "weights")
    return checked(random, *with_special(sample, names, random))


def mla(random: Random) -> str:
    case, dtype = mla_case(random), random.choice(draw.DTYPES)
    sample, name = with_special(sparse_flash_mla.build(case, dtype), MLA_SOURCES, random)
    return checked(random, sample, name, not name.endswith("kv"))


def mla_gradient(random: Random) -> str:
    case, dtype = replace(mla_case(random), lse=True), random.choice(draw.DTYPES)
    forward, name = with_special(sparse_flash_mla.build(case, dtype), MLA_SOURCES, random)
    d_out = randomness.Random(case.id, dtype).normal(*forward.inputs["query"].shape)
    outputs = forward.call(sparse_flash_mla.reference)
    return checked(random, sparse_flash_mla.gradient_call(forward, outputs, d_out), name)


def loss_with_target(random: Random) -> str:
    case, dtype = replace(sparse_case(random, gradient=True), block=1), random.choice(draw.DTYPES)
    names = ("query_index", "key_index", "weights")
    return checked(random, *with_special(kl_loss_grad.build(case, dtype), names, random))


CASES: dict[str, Case] = {
    "valid/infinities/sparse_flash_attention": sparse,
    "valid/infinities/sparse_flash_attention_grad": sparse_gradient,
    "valid/infinities/flash_attention_score": dense,
    "valid/infinities/flash_attention_score_grad": dense_gradient,
    "valid/infinities/prompt_flash_attention": prompt,
    "valid/infinities/lightning_indexer_grad": indexer_gradient,
    "valid/infinities/sparse_flash_mla": mla,
    "valid/infinities/sparse_flash_mla_grad": mla_gradient,
    "valid/infinities/sparse_lightning_indexer_grad_kl_loss": loss,
    "valid/infinities/sparse_lightning_indexer_kl_loss_grad": loss_with_target,
}
