"""Sinks and ropes of dense attention, with and without functions of CANN that take them.

Run on every device of run.py.
"""

from __future__ import annotations

from dataclasses import replace

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_check.gradients import (
    differentiable_names,
    incoming_gradients,
    outputs_and_gradients,
)
from ascend_attn_check.samples.flash_attention_score import FlashCase, build
from ascend_attn_ops._core.statistics import by_token
from support.samples import OPERATORS, Recipe, Sample
from support.simulated_npu import DEVICE
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

OPERATOR = OPERATORS["flash_attention_score"]
EXTENDED = [recipe for recipe in OPERATOR.recipes if recipe.case.is_extended]
PRODUCT, CANN = DEVICE
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def assert_within_the_bounds(sample: Sample) -> None:
    gradient = OPERATOR.gradient
    assert gradient is not None
    assert gradient.expected is not None
    outputs, gradients = outputs_and_gradients(sample.to("npu"))
    assert all(x.device.type == "npu" for x in (*outputs, *gradients))
    outputs = tuple(x.cpu() for x in outputs)
    OPERATOR.bounds.check(sample, outputs)
    bounds = gradient.expected(sample, outputs, *incoming_gradients(sample, outputs))
    expected = dict(zip(gradient.inputs, bounds, strict=True))
    for name, x in zip(differentiable_names(sample), gradients, strict=True):
        expected[name].check(x.cpu())


@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=str)
@pytest.mark.parametrize("recipe", EXTENDED, ids=lambda recipe: recipe.id)
def test_within_the_bounds(recipe: Recipe, dtype: torch.dtype) -> None:
    """Whichever functions compute it. test_npu_equals_cpu.py compares bits, in half types."""
    assert_within_the_bounds(recipe.make(dtype))


SINK = FlashCase(d=(16, 16), sink=True)
PACK = FlashCase(layout="TND", lengths=((3, 6), (5, 9)), d=(32, 32), mode=3)
PACKED_SINK = replace(PACK, sink=True)
ROPES = replace(PACK, rope=16)  # A2 reads them in place, in bfloat16
BOTH = replace(ROPES, sink=True)
ROPES_OF_950 = FlashCase(d=(128, 128), rope=64, layout="BSH", mode=3)
JOINED = FlashCase(layout="BSND", d=(16, 16), rope=8, mode=2)
WIDE = FlashCase(layout="BSND", b=1, s=(3, 5), heads=(256, 256), d=(192, 128), sink=True)

V2, V2_PACKED = ("ScoreV2", "ScoreGradV2"), ("VarLenScoreV2", "UnpaddingScoreGradV2")
V3, V5 = ("ScoreV3", "ScoreGradV3"), ("VarLenScoreV5", "UnpaddingScoreGradV5")
V4 = ("ScoreV4", "ScoreGradV4")
BEFORE_9_1 = dict(zip((V3[1], V5[1]), (V2[1], V2_PACKED[1]), strict=True))
# By product: what is launched for a call and for its gradient.
LAUNCHED: list[tuple[FlashCase, torch.dtype, tuple[str, str], tuple[str, str]]] = [
    (SINK, HALF, V3, V4), (SINK, BF16, V3, V4), (SINK, FLOAT, V2, V2),
    (PACKED_SINK, BF16, V5, V4), (PACKED_SINK, FLOAT, V2_PACKED, V2_PACKED),
    (ROPES, BF16, V5, V2_PACKED), (ROPES, HALF, V2_PACKED, V2_PACKED),
    (BOTH, BF16, V5, V4), (BOTH, HALF, V5, V4),
    *((replace(ROPES, **x), BF16, V2_PACKED, V2_PACKED) for x in (
        {"mode": None}, {"mode": 6, "prefix": (4, 5)}, {"d": (32, 16)}, {"d": (40, 40)},
        {"rope": 40}, {"pse": "full"}, {"keep_prob": 0.5},
    )),
    (ROPES_OF_950, BF16, V2, V4), (JOINED, BF16, V2, V2),
    (replace(JOINED, sink=True), BF16, V3, V4),
    # CANN's host code refuses the gradient of these sizes in this layout, with or without a sink.
    (WIDE, BF16, ("ScoreV3", "ScoreGradV2"), V4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "on_a2", "on_950"), LAUNCHED, ids=lambda x: getattr(x, "id", None)
)
def test_launched_functions(
    case: FlashCase, dtype: torch.dtype, on_a2: tuple[str, str], on_950: tuple[str, str]
) -> None:
    forward, gradient = on_950 if PRODUCT == "950" else on_a2
    if PRODUCT == "A2" and CANN < "9.1" and case.sink:
        # The kernel's sums for the gradient of a sink overflow, or miss a part. Ropes that the
        # kernel reads in place stay with it.
        gradient = gradient if (case, dtype) == (BOTH, BF16) else BEFORE_9_1.get(gradient, gradient)
    with cann_simulator.recorded_calls() as log:
        assert_within_the_bounds(build(case, dtype))
    names = [x["function"].removeprefix("aclnnFlashAttention") for x in log if x.get("phase") == 1]
    assert [x for x in names if "Score" in x] == [forward, gradient]


# Attention over parts of the keys, merged by log-sum-exp, has the CPU's gradients, which are of
# different functions on different devices.

# Some rows have no key.
MERGED_PACK = FlashCase(layout="TND", lengths=((7, 3), (5, 9)), d=(32, 32), mode=3)
DENSE = FlashCase(s=(9, 7), d=(16, 16), mode=3)
CASES = [
    replace(case, sink=sink, rope=rope)
    for case in (DENSE, MERGED_PACK)
    for sink, rope in ((False, 0), (True, 0), (False, 16), (True, 16))
]


def part(sample: Sample) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row, and its output."""
    out, *statistics = sample.call(torch.ops.ascend)
    lse = ops.log_sum_exp(*statistics)
    if sample.options["layout"] == "TND":
        lse = by_token(lse, sample.options["actual_seq_lengths_query"])
    return lse[..., 0], out


def leaves_of(sample: Sample) -> tuple[Sample, list[Tensor]]:
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    return leaf, [leaf.tensors[name] for name in names]


def gradients_of_the_lse(sample: Sample) -> tuple[Tensor, ...]:
    leaf, leaves = leaves_of(sample)
    lse, _ = part(leaf)
    total = leaf.call(torch.ops.ascend)[2].sum()
    return torch.autograd.grad(lse[lse.isfinite()].square().sum() + total, leaves)


def merged_gradients(sample: Sample) -> tuple[Tensor, ...]:
    leaf, leaves = leaves_of(sample)
    other = leaf.replace(key=leaf.inputs["key"] * 0.5, value=-leaf.inputs["value"])
    lse, outputs = zip(part(leaf), part(other), strict=True)
    out, _ = ops.attention_update(list(lse), list(outputs))
    return torch.autograd.grad(out, leaves, out.detach().cos())


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_are_those_of_the_cpu(case: FlashCase, dtype: torch.dtype, error: float) -> None:
    sample = build(case, dtype)
    for compute in (merged_gradients, gradients_of_the_lse):
        expected, gradients = compute(sample.double()), compute(sample.to("npu"))
        for name, x, y in zip(differentiable_names(sample), gradients, expected, strict=True):
            assert (x.cpu() - y).norm() <= error * y.norm(), name


@pytest.mark.parametrize("case", [DENSE, MERGED_PACK, CASES[-1]], ids=lambda case: case.id)
def test_gradients_of_one_output_are_one_launch(case: FlashCase) -> None:
    leaf, leaves = leaves_of(build(case, torch.bfloat16).to("npu"))
    lse, out = part(leaf)
    for result, launches in ((out.sum(), 1), (out.sum() + lse.isfinite().sum(), 1),
                             (out.sum() + lse.clamp(min=-9).sum(), 2),
                             (lse.clamp(min=-9).sum(), 1)):  # fmt: skip
        with cann_simulator.recorded_calls() as log:
            torch.autograd.grad(result, leaves, retain_graph=True)
        assert sum("ScoreGrad" in x["function"] for x in log if x.get("phase") == 2) == launches
