"""The sparse_indices that arrive at the device, whose kernels misread some of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from arrivals import arrivals, arriving
from ascend_attn_ops.check.samples.sparse import SparseCase
from ascend_attn_ops.check.selection import cut_blocks_last, rows_of
from support.samples import OPERATORS, Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

FORWARD, GRADIENT = "sparse_flash_attention", "sparse_flash_attention_grad"
TND = SparseCase(layout="TND", lengths=((5, 0, 12), (21, 3, 17)), tail=(1, 4), absorbed=True)
# With keys that end within a block: in every row, in some, by lengths, in pages.
CASES = [
    SparseCase(s=(9, 30), k=9, rope=8, absorbed=True),
    SparseCase(s=(9, 30), mode=0, k=9, absorbed=True),
    SparseCase(s=(11, 5), k=3, absorbed=True),  # rows without keys
    SparseCase(s=(9, 17), lengths=((9, 7), (17, 6)), k=4, absorbed=True),
    SparseCase(s=(9, 17), lengths=((9, 7), (17, 6)), mode=0, k=4, absorbed=True),
    replace(TND, k=5, rope=8),
    replace(TND, k=5, mode=0, selection_heads=False),
]


def arriving_rows(sample: Sample, operator: str) -> Tensor:
    """The indices, one row of slots per token."""
    return arriving(sample, operator, "sparse_indices").flatten(0, -2)


def tokens_of_sequences(sample: Sample) -> list[int]:
    """The device reads no others."""
    return [row.token for row in rows_of(sample)]


def expected_rows(sample: Sample) -> Tensor:
    return cut_blocks_last(sample).flatten(0, -2)[tokens_of_sequences(sample)]


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cut_blocks_are_last_in_the_gradient(case: SparseCase, block: int) -> None:
    sample = OPERATORS[GRADIENT].make(replace(case, block=block), torch.bfloat16)
    found = arriving_rows(sample, GRADIENT)
    if case.layout == "TND" or case.lengths is None:  # otherwise a pack of these tokens alone
        found = found[tokens_of_sequences(sample)]
    assert torch.equal(found, expected_rows(sample))


BLOCKS_OF_16 = SparseCase(s=(9, 32), mode=0, block=16, k=2, absorbed=True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("operator", "case"),
    [
        (FORWARD, CASES[0]), (FORWARD, replace(CASES[0], pattern="hole")), (FORWARD, BLOCKS_OF_16),
        (GRADIENT, BLOCKS_OF_16),
    ],
    ids=lambda x: getattr(x, "id", x),
)  # fmt: skip
def test_single_keys_and_whole_blocks_are_launched_as_they_are(
    operator: str, case: SparseCase
) -> None:
    """For single keys, it would take several times as long to look for gaps as to launch."""
    sample = OPERATORS[operator].make(case, torch.bfloat16)
    indices = sample.arguments["sparse_indices"].flatten(0, -2)
    assert torch.equal(arriving_rows(sample, operator), indices)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("block", [8, 64])
def test_rows_that_select_nothing_are_zero(layout: str, block: int) -> None:
    """The device writes infinities there, and in the other rows, here, ones."""
    case = SparseCase(s=(9, 30), k=2) if layout == "BSND" else replace(TND, k=2)
    case = replace(case, block=block, pattern="first", absorbed=True)
    sample = OPERATORS[FORWARD].make(case, torch.bfloat16)
    with arrivals(FORWARD, "sparse_indices"):
        out = sample.to("npu").call(torch.ops.ascend)[0].cpu().flatten(0, -3)
    nothing = sample.arguments["sparse_indices"].flatten(0, -2)[:, 0] == -1
    assert nothing.any()
    assert (out[nothing] == 0).all()
    tokens = torch.tensor(tokens_of_sequences(sample))
    assert (out[tokens[~nothing[tokens]]] == 1).all()
