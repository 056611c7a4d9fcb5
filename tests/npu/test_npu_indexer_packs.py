"""Packs in which no query has a key: the device writes outside its outputs for them."""

from __future__ import annotations

import cann_simulator
import pytest
import torch
from arrivals import arriving
from ascend_attn_ops.check.samples.sparse import SparseCase
from support.samples import OPERATORS
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("no_limits")

OPERATOR = "lightning_indexer"
LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
WITHOUT_PAIRS = [((0, 0), (0, 0)), ((5, 7, 3), (0, 0, 0)), ((17, 0), (0, 30)), ((0, 4), (3, 0))]
WITH_PAIRS = [((5, 0, 3), (2, 9, 4)), ((0, 1), (0, 1))]


def case_of(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> SparseCase:
    return SparseCase(layout="TND", lengths=lengths, tail=(2, 3), index_d=16)


@pytest.mark.parametrize("lengths", WITHOUT_PAIRS, ids=str)
@pytest.mark.parametrize("mode", [0, 3])
def test_one_pair_is_launched_and_overwritten(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], mode: int
) -> None:
    sample = OPERATORS[OPERATOR].make(case_of(lengths), torch.bfloat16).given(sparse_mode=mode)
    for name in LENGTHS:
        assert arriving(sample, OPERATOR, name).tolist() == [1] * len(lengths[0])
    indices, values = sample.to("npu").call(torch.ops.ascend)
    assert (indices == -1).all()
    assert (values == -torch.inf).all()


@pytest.mark.parametrize("lengths", WITH_PAIRS, ids=str)
def test_other_packs_arrive_as_they_are(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    sample = OPERATORS[OPERATOR].make(case_of(lengths), torch.bfloat16)
    for name in LENGTHS:
        assert torch.equal(arriving(sample, OPERATOR, name), sample.arguments[name])


@pytest.mark.parametrize("lengths", [*WITHOUT_PAIRS, *WITH_PAIRS], ids=str)
def test_lengths_on_the_host_need_no_kernels(
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    sample = OPERATORS[OPERATOR].make(case_of(lengths), torch.bfloat16)
    on_host = {name: sample.arguments[name].cpu() for name in LENGTHS}
    with cann_simulator.recorded_calls() as log:
        outputs = sample.to("npu").replace(**on_host).call(torch.ops.ascend)
        torch.npu.synchronize()
    functions = {entry.get("function") for entry in log}
    assert ("aclnnLightningIndexer" in functions) == (lengths in WITH_PAIRS)
    assert not functions & {"aclnnStack", "aclnnMinimum", "aclnnAmax"}
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))
