"""Attention over parts of the keys, merged by log-sum-exp, has the CPU's gradients on the NPU.

Run on every device of run.py, whose gradients are of different functions.
"""

from __future__ import annotations

from dataclasses import replace

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_ops._statistics import by_token
from ascend_attn_ops.check.gradients import differentiable_names
from ascend_attn_ops.check.samples.flash_attention_score import FlashCase, build
from support.samples import Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

# Some rows have no key.
PACK = FlashCase(layout="TND", lengths=((7, 3), (5, 9)), d=(32, 32), mode=3)
DENSE = FlashCase(s=(9, 7), d=(16, 16), mode=3)
CASES = [
    replace(case, sink=sink, rope=rope)
    for case in (DENSE, PACK)
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
    return torch.autograd.grad(lse[lse.isfinite()].square().sum(), leaves)


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


@pytest.mark.parametrize("case", [DENSE, PACK, CASES[-1]], ids=lambda case: case.id)
def test_gradients_of_one_output_are_one_launch(case: FlashCase) -> None:
    leaf, leaves = leaves_of(build(case, torch.bfloat16).to("npu"))
    lse, out = part(leaf)
    for result, launches in ((out.sum(), 1), (out.sum() + lse.isfinite().sum(), 1),
                             (out.sum() + lse.clamp(min=-9).sum(), 2),
                             (lse.clamp(min=-9).sum(), 1)):  # fmt: skip
        with cann_simulator.recorded_calls() as log:
            torch.autograd.grad(result, leaves, retain_graph=True)
        assert sum("ScoreGrad" in x["function"] for x in log if x.get("phase") == 2) == launches
