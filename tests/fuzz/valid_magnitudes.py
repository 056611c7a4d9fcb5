"""Numbers of any size: the weights of forward and backward are the same, and a power of two changes
no digit of a result."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch
from ascend_attn_check.samples import (
    flash_attention_score,
    lightning_indexer,
    randomness,
    sparse_flash_attention,
    sparse_flash_mla,
)
from ascend_attn_check.samples import sparse_lightning_indexer_grad_kl_loss as kl_loss
from ascend_attn_check.samples import sparse_lightning_indexer_kl_loss_grad as kl_loss_grad
from support import probabilities
from support.samples import Sample

from . import draw
from .calls import THREADS, Outputs, threads
from .case import Case, Finding
from .valid_dense import flash_case
from .valid_sparse import mla_with_lse, sparse_case

# The largest product of query and key, as a power of two. Larger products make scores overflow.
LARGEST_PRODUCT = 100
# The largest element of a tensor, as a power of two.
LARGEST = {torch.float16: 12, torch.bfloat16: 60, torch.float32: 60, torch.float64: 400}


def exponents(random: Random, dtype: torch.dtype) -> tuple[int, int]:
    """The powers of two of query and of key."""
    largest = LARGEST[dtype]
    first = random.randint(0, largest)
    most = LARGEST_PRODUCT if dtype != torch.float64 else 2 * largest
    return first, random.randint(0, min(largest, most - first))


def with_factors(sample: Sample, query: int, key: int) -> Sample:
    """Query times 2^query and key times 2^key; the scores are the same."""
    powers = {"query": query, "query_rope": query}
    powers |= dict.fromkeys(("key", "key_rope", "ori_kv", "cmp_kv"), key)
    given = {name: power for name, power in powers.items() if name in sample.tensors}
    scaled = {name: sample.tensors[name] * 2.0**power for name, power in given.items()}
    if "value" in sample.inputs and sample.inputs["value"] is sample.inputs["key"]:
        scaled["value"] = sample.inputs["value"].clone()
    options = sample.options
    if "scale_value" in options:
        scaled["scale_value"] = options["scale_value"] * 2.0 ** -(query + key)
    return sample.replace(**scaled)


def compare(actual: Outputs, expected: Outputs, powers: tuple[int, ...]) -> None:
    """The outputs are equal up to the factor 2^power, where their dtype has both."""
    for number, (x, y, power) in enumerate(zip(actual, expected, powers, strict=True)):
        if not x.is_floating_point():
            if not torch.equal(x, y):
                raise Finding(f"output {number}: {int((x != y).sum())} elements differ")
            continue
        limits, exact = torch.finfo(x.dtype), y.double() * 2.0**power
        sizes = torch.minimum(y.double().abs(), exact.abs()), exact.abs()
        has_both = (sizes[0] >= limits.smallest_normal) & (sizes[1] <= limits.max)
        differ = has_both & (x.double() != exact)
        if bool(differ.any()):
            at = tuple(int(i) for i in differ.nonzero()[0])
            raise Finding(
                f"output {number}: {int(differ.sum())} of {x.numel()} elements differ, at {at} "
                f"{float(x[at]):.9g} against {float(exact[at]):.9g}"
            )


def assert_scaled(sample: Sample, scaled: Sample, powers: tuple[int, ...], random: Random) -> None:
    """With as many threads, which decide the order of sums over tokens."""
    with threads(random.choice(THREADS)):
        outputs = sample.call(torch.ops.ascend)
        compare(scaled.call(torch.ops.ascend), outputs, powers)


def attention(random: Random, module: Any, case: Any, gradients: str) -> str:
    """`gradients`: which of the exponents each of them loses, a, b or none (0)."""
    dtype = random.choice(draw.DTYPES)
    sample, (a, b) = module.build(case, dtype), exponents(random, dtype)
    scaled = with_factors(sample, a, b)
    assert_scaled(sample, scaled, (0, 0, 0), random)
    outputs = sample.call(torch.ops.ascend)
    d_out = randomness.Random(case.id, dtype).normal(*outputs[0].shape)
    calls = (module.gradient_call(x, outputs, d_out) for x in (sample, scaled))
    assert_scaled(*calls, tuple(-{"a": a, "b": b, "0": 0}[x] for x in gradients), random)
    return draw.label(case, dtype)


def dense(random: Random) -> str:
    case = replace(flash_case(random), pse=None, pse_type=1)
    return attention(random, flash_attention_score, case, "ab00ab0" if case.is_extended else "ab0")


def sparse(random: Random) -> str:
    case = sparse_case(random, gradient=True)
    return attention(random, sparse_flash_attention, case, "ab0ab")


def mla(random: Random) -> str:
    """Keys are values, so their factor is that of the outputs too."""
    case, dtype = mla_with_lse(random), random.choice(draw.DTYPES)
    sample, (a, b) = sparse_flash_mla.build(case, dtype), exponents(random, dtype)
    scaled = with_factors(sample, a, b)
    assert_scaled(sample, scaled, (b, 0), random)
    out, softmax_lse = sample.call(torch.ops.ascend)
    d_out = randomness.Random(case.id, dtype).normal(*out.shape)
    calls = [
        sparse_flash_mla.gradient_call(x, (y, softmax_lse), d_out)
        for x, y in ((sample, out), (scaled, out * 2.0**b))
    ]
    assert_scaled(calls[0], calls[1], (b - a, 0, 0, b, 0), random)
    return draw.label(case, dtype)


def indexer(random: Random) -> str:
    case, dtype = sparse_case(random), random.choice(draw.DTYPES)
    sample, (a, b) = lightning_indexer.build(case, dtype), exponents(random, dtype)
    if not sample.options["return_values"]:
        sample = sample.replace(return_values=True)
    assert_scaled(sample, with_factors(sample, a, b), (0, a + b), random)
    return draw.label(case, dtype)


def loss(random: Random) -> str:
    case = replace(sparse_case(random, loss=True, gradient=True), pattern="random")
    dtype = random.choice(draw.DTYPES)
    sample, (a, b) = kl_loss.build(case, dtype), exponents(random, dtype)
    assert_scaled(sample, with_factors(sample, a, b), (0, 0, 0, 0), random)
    return draw.label(case, dtype)


def loss_with_target(random: Random) -> str:
    """The scores are the same: float32 weights have the inverse of the other factors."""
    case, dtype = replace(sparse_case(random, gradient=True), block=1), random.choice(draw.DTYPES)
    sample = kl_loss_grad.build(case, dtype)
    a, b = random.randint(0, 6), random.randint(0, 6)
    powers = {"query_index": a, "key_index": b, "weights": -a - b}
    scaled = sample.replace(
        **{name: sample.inputs[name] * 2.0**power for name, power in powers.items()}
    )
    assert_scaled(sample, scaled, (-a, -b, a + b, 0), random)
    return draw.label(case, dtype)


def with_scores(sample: Sample, random: Random) -> Sample:
    """Up to 1e30 times as large, by query and key and by the scale."""
    a, b = exponents(random, sample.inputs["query"].dtype)
    factor = 2.0 ** random.choice((0, random.uniform(0, 100)))
    scaled = with_factors(sample, a, b)
    return scaled.replace(scale_value=scaled.options["scale_value"] * factor)


def weights(sample: Sample, of: probabilities.Probabilities, adds_up: bool) -> None:
    try:
        of.assert_same()
        if adds_up:
            of.assert_rows_add_up()
    except AssertionError as error:
        raise Finding(f"{sample.operator} {sample.id}: {error}") from None


def weights_of_dense(random: Random) -> str:
    case, dtype = flash_case(random), random.choice(draw.DTYPES)
    size = random.choice((16, 40, 192))
    case = replace(case, d=(size, size))
    if case.pse == "key" and case.b > 1:  # the gradient wants a bias for each batch
        case = replace(case, pse=None, pse_type=1)
    sample = with_scores(flash_attention_score.build(case, dtype), random)
    # With a sink, the weights of the keys add up to less than 1.
    adds_up = case.keep_prob == 1 and not case.sink
    weights(sample, probabilities.dense(sample), adds_up)
    return draw.label(case, dtype)


def weights_of_sparse(random: Random) -> str:
    case, dtype = sparse_case(random, gradient=True), random.choice(draw.DTYPES)
    if case.layout == "TND":
        return "no such case"
    case = replace(case, d=random.choice((16, 40, 192)), absorbed=False)
    sample = with_scores(sparse_flash_attention.build(case, dtype), random)
    weights(sample, probabilities.sparse(sample), adds_up=True)
    return draw.label(case, dtype)


CASES: dict[str, Case] = {
    "valid/magnitudes/flash_attention_score": dense,
    "valid/magnitudes/sparse_flash_attention": sparse, "valid/magnitudes/sparse_flash_mla": mla,
    "valid/magnitudes/lightning_indexer": indexer,
    "valid/magnitudes/sparse_lightning_indexer_grad_kl_loss": loss,
    "valid/magnitudes/sparse_lightning_indexer_kl_loss_grad": loss_with_target,
    "valid/weights/flash_attention_score": weights_of_dense,
    "valid/weights/sparse_flash_attention": weights_of_sparse,
}  # fmt: skip
