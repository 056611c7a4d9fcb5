"""Helpers for trainers, on NPU tensors."""

from __future__ import annotations

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.check.samples.sparse import SparseCase
from support.samples import OPERATORS
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.func import grad, vmap

PACKED = SparseCase(layout="TND", lengths=((3, 0, 6), (5, 2, 9)))

pytestmark = pytest.mark.usefixtures("no_limits")


def test_attach_loss() -> None:
    output, parameter = torch.randn(3).npu(), torch.ones(2).npu().requires_grad_()
    attached = ops.attach_loss(output, parameter * parameter, scale=0.5)
    attached.backward(torch.ones(3).npu())
    assert torch.equal(attached.cpu(), output.cpu())
    assert torch.equal(parameter.grad.cpu(), torch.ones(2))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", ["lightning_indexer", "sparse_flash_attention", "flash_attention_score"]
)
def test_autocast(name: str) -> None:
    operator = OPERATORS[name]
    sample = operator.make(operator.cases[0], torch.float32)
    half = sample.map(lambda x: x.bfloat16() if x.is_floating_point() else x)
    with torch.autocast("npu", torch.bfloat16):
        outputs = sample.to("npu").call(ops)
    assert_same_bits(tuple(x.cpu() for x in outputs), half.call(torch.ops.ascend))


def test_torch_func() -> None:
    x = torch.randn(3, 1, 8, 2, 16, dtype=torch.bfloat16)

    def loss(x: Tensor) -> Tensor:
        return ops.flash_attention_score(x, x, x, num_heads=2, layout="BSND")[0].sum()

    on_npu = vmap(grad(loss))(x.npu()).cpu()
    assert_same_bits((on_npu,), (vmap(grad(loss))(x),))


def test_lengths_as_a_list() -> None:
    sample = OPERATORS["lightning_indexer"].make(PACKED, torch.bfloat16)
    as_lists = {
        name: sample.arguments[name].tolist()
        for name in ("actual_seq_lengths_query", "actual_seq_lengths_key")
    }
    outputs = sample.to("npu").replace(**as_lists).call(ops)
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))


def test_lengths_on_the_device_of_an_operator_that_reads_them_on_the_host() -> None:
    sample = OPERATORS["sparse_lightning_indexer_grad_kl_loss"].make(PACKED, torch.bfloat16)
    on_device = {
        name: torch.tensor(sample.arguments[name]).npu()
        for name in ("actual_seq_lengths_query", "actual_seq_lengths_key")
    }
    outputs = sample.to("npu").given(**on_device).call(ops)
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))
