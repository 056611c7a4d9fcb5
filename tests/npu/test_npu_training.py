"""Helpers for trainers, on NPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.check.samples.sparse import LENGTHS, SparseCase
from device_samples import as_launched
from support.samples import OPERATORS
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.func import grad, vmap

PACKED = SparseCase(layout="TND", lengths=((3, 0, 6), (5, 2, 9)))

pytestmark = pytest.mark.usefixtures("no_limits")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", ["lightning_indexer", "sparse_flash_attention", "flash_attention_score"]
)
def test_autocast(name: str) -> None:
    operator = OPERATORS[name]
    sample = as_launched(operator.make(operator.cases[0], torch.float32))
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


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("lightning_indexer", Tensor.tolist),
        ("sparse_lightning_indexer_grad_kl_loss", Tensor.npu),
    ],
)
def test_lengths_of_the_other_kind(name: str, given: Callable[[Any], Any]) -> None:
    """As lists, or on the device where the host reads them."""
    sample = OPERATORS[name].make(PACKED, torch.bfloat16)
    lengths = {x: given(sample.arguments[x]) for x in LENGTHS}
    outputs = sample.to("npu").given(**lengths).call(ops)
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))
