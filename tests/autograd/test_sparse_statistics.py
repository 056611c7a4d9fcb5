"""Gradients through the statistics of the sparse operators, which are those of the log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import reference
from ascend_attn_ops.check.gradients import differentiable_names
from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.check.samples.sparse_flash_attention import SPARSE_FLASH_ATTENTION
from ascend_attn_ops.check.samples.sparse_flash_mla import SPARSE_FLASH_MLA, MlaCase
from support.samples import Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

PACK = ((4, 0, 3), (3, 2, 6))  # with rows without keys
ATTENTION = [SparseCase(s=(6, 5), d=4, heads=2, k=3), SparseCase(layout="TND", lengths=PACK, d=4)]
MLA = [
    MlaCase(kind="swa", s=(6, 5, 0), d=4),
    MlaCase(kind="hca", s=(6, 5, 2), d=4, sink=False),
    MlaCase(layout="TND", lengths=(*PACK, (1, 1, 3)), tail=(2, 1, 1), d=4),
]


def made(case: SparseCase | MlaCase, dtype: torch.dtype = torch.float64) -> Sample:
    operator = SPARSE_FLASH_MLA if isinstance(case, MlaCase) else SPARSE_FLASH_ATTENTION
    return operator.make(case, dtype)


def of_statistics(outputs: tuple[Tensor, ...]) -> Tensor:
    """A function of the log-sum-exp of each row that has keys."""
    lse = outputs[1] if len(outputs) == 2 else ops.log_sum_exp(*outputs[1:])
    return (
        lse.masked_fill(lse.isinf(), 0)
        * torch.arange(lse.numel(), device=lse.device).view(lse.shape)
    ).sum()


def both(outputs: tuple[Tensor, ...]) -> Tensor:
    return of_statistics(outputs) + outputs[0].square().sum()


def gradients(sample: Sample, of: Callable[..., Tensor], operators: Any = torch.ops.ascend) -> Any:
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    leaves = [leaf.tensors[name] for name in names]
    return torch.autograd.grad(
        of(leaf.call(operators)), leaves, allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize("of", [of_statistics, both])
@pytest.mark.parametrize("case", [*ATTENTION, *MLA], ids=lambda case: case.id)
def test_gradients_are_those_of_the_reference(
    case: SparseCase | MlaCase, of: Callable[..., Tensor]
) -> None:
    sample = made(case)
    expected = gradients(sample, of, reference)
    torch.testing.assert_close(gradients(sample, of), expected, rtol=1e-9, atol=1e-9)
    rounded = gradients(made(case, torch.bfloat16), of)
    for x, y in zip(rounded, gradients(made(case, torch.bfloat16).double(), of), strict=True):
        assert (x - y).norm() <= 0.02 * y.norm()


@pytest.mark.parametrize("case", [ATTENTION[0], MLA[0]], ids=lambda case: case.id)
def test_compiled(case: SparseCase | MlaCase) -> None:
    sample = made(case)
    names = differentiable_names(sample)

    def call(*tensors: Tensor) -> Tensor:
        return both(sample.replace(**dict(zip(names, tensors, strict=True))).call(torch.ops.ascend))

    leaves = [sample.tensors[name].detach().clone().requires_grad_() for name in names]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, gradients(sample, both), rtol=0, atol=0)


def test_shapes_on_meta() -> None:
    sample = made(MLA[1]).to("meta")
    given = gradients(sample, both)
    names = differentiable_names(sample)
    assert [x.shape for x in given] == [sample.tensors[name].shape for name in names]
    out, lse = sample.call(torch.ops.ascend)
    call = sample.of_gradient(d_out=out, out=out, softmax_lse=lse).given(d_softmax_lse=lse[..., 1:])
    with pytest.raises(ValueError, match=r"sparse_flash_mla_grad: d_softmax_lse: expected shape"):
        call.call(torch.ops.ascend)


def mla(query: Tensor, kv: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    return ops.sparse_flash_mla(query, kv, scale_value=0.3, sink=sink, ori_mask_mode=0)


def attention(query: Tensor, kv: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    indices = torch.arange(kv.shape[1], dtype=torch.int32)
    out, *statistics = ops.sparse_flash_attention(
        query, kv, kv, indices.expand(1, query.shape[1], 1, -1), scale_value=0.3, sparse_mode=0
    )
    return out, ops.log_sum_exp(*statistics)


@pytest.mark.parametrize("attend", [mla, attention])
def test_merged_parts_have_the_gradients_of_the_whole(attend: Callable[..., Any]) -> None:
    query, kv, sink, d_out = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 6, 4, 8), (1, 9, 1, 8), (4,), (1, 6, 4, 8))
    )
    leaves = [query, kv, sink] if attend is mla else [query, kv]
    parts = [attend(query, kv[:, :4], sink), attend(query, kv[:, 4:], None)]
    outs, lses = zip(*((out.flatten(0, 2), lse.flatten()) for out, lse in parts), strict=True)
    merged, merged_lse = ops.attention_update(lses, outs)
    out, lse = attend(query, kv, sink)
    torch.testing.assert_close(merged.view_as(out), out)
    torch.testing.assert_close(merged_lse.view_as(lse), lse)
    torch.testing.assert_close(
        torch.autograd.grad(merged, leaves, d_out.view_as(merged)),
        torch.autograd.grad(out, leaves, d_out),
    )
