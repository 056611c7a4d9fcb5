"""Gradients through the statistics of the sparse operators on the NPU, and their launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_ops.check.gradients import differentiable_names
from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.check.samples.sparse_flash_attention import SPARSE_FLASH_ATTENTION
from ascend_attn_ops.check.samples.sparse_flash_mla import DEVICE, SPARSE_FLASH_MLA, MlaCase
from support.samples import Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

ATTENTION = SparseCase(s=(3, 5), heads=8, d=512, rope=64, k=1024, absorbed=True)
PACK = replace(DEVICE, layout="TND", lengths=((20, 9), (20, 9), (5, 2)))
CASES = [
    ATTENTION,
    replace(ATTENTION, b=3, s=(6, 9), lengths=((6, 3, 4), (9, 5, 4))),
    DEVICE,
    PACK,
    # The first rows have no keys.
    replace(DEVICE, kind="swa", ratio=1, s=(20, 18, 0)),
]


def made(case: SparseCase | MlaCase, dtype: torch.dtype) -> Sample:
    operator = SPARSE_FLASH_MLA if isinstance(case, MlaCase) else SPARSE_FLASH_ATTENTION
    return operator.make(case, dtype)


def of_out(out: Tensor, *_: Tensor) -> Tensor:
    return out.double().square().sum()


def of_lse(_: Tensor, *statistics: Tensor) -> Tensor:
    lse = statistics[0] if len(statistics) == 1 else ops.log_sum_exp(*statistics)
    return lse[lse.isfinite()].square().sum()


def of_both(*outputs: Tensor) -> Tensor:
    return of_out(*outputs) + of_lse(*outputs)


def gradients(sample: Sample, loss: Callable[..., Tensor]) -> Any:
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    return torch.autograd.grad(
        loss(*leaf.call(torch.ops.ascend)), [leaf.tensors[name] for name in names]
    )


@pytest.mark.parametrize(("loss", "launches"), [(of_out, 1), (of_lse, 1), (of_both, 2)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients(case: SparseCase | MlaCase, loss: Callable[..., Tensor], launches: int) -> None:
    sample = made(case, torch.bfloat16)
    with cann_simulator.recorded_calls() as log:
        actual = gradients(sample.to("npu"), loss)
    assert sum(x["function"].endswith("Grad") for x in log if x.get("phase") == 2) == launches
    for x, y in zip(actual, gradients(sample.double(), loss), strict=True):
        assert (x.cpu() - y).norm() < 0.03 * y.norm()


@pytest.mark.parametrize("case", [ATTENTION, DEVICE], ids=lambda case: case.id)
def test_float16_is_refused(case: SparseCase | MlaCase) -> None:
    sample = made(case, torch.float16).to("npu")
    with pytest.raises(NotImplementedError, match=r"_grad: d_softmax_\w+: expected bfloat16"):
        gradients(sample, of_lse)
