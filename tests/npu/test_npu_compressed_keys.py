"""The device gets of compressed keys: cumulative lengths with a 0, and a residual always."""

from __future__ import annotations

from dataclasses import replace

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from arrivals import arriving
from ascend_attn_ops.check.samples.sparse import SparseCase
from support.samples import OPERATORS, Sample
from support.tolerance import assert_same_bits

INDEXER, LOSS = "lightning_indexer", "sparse_lightning_indexer_kl_loss_grad"
SIZES = {"heads": 8, "d": 128, "index_heads": 8, "index_d": 128, "k": 512, "ratio": 4}
PACK = SparseCase(layout="TND", **SIZES)
BSND = SparseCase(s=(11, 2), **SIZES)
TND = replace(PACK, lengths=((13, 3, 8), (3, 0, 2)))
GIVEN = replace(PACK, lengths=((3, 5), (4, 9)), residuals=(1, 3))
PADDED = SparseCase(b=3, s=(13, 4), lengths=((13, 3, 8), (3, 0, 2)), **SIZES)
PADDED_GIVEN = SparseCase(s=(6, 9), lengths=((3, 5), (4, 9)), residuals=(1, 3), **SIZES)
NO_PAIR = SparseCase(s=(6, 2), lengths=((3, 0), (0, 2)), residuals=(1, 3), **SIZES)
NO_KEY = SparseCase(s=(3, 0), **SIZES)
TAIL = replace(PACK, lengths=((13, 3), (3, 0)), tail=(2, 3))
PAGED = replace(PACK, lengths=((1, 3), (75, 32)), residuals=(1, 3), page=16)

each_operator = pytest.mark.parametrize("operator", [INDEXER, LOSS])


def sample_of(operator: str, case: SparseCase) -> Sample:
    return OPERATORS[operator].make(case, torch.bfloat16)


@each_operator
@pytest.mark.parametrize(
    "case", [BSND, TND, GIVEN, PADDED, PADDED_GIVEN, NO_PAIR, NO_KEY, TAIL, PAGED],
    ids=lambda case: case.id,
)  # fmt: skip
def test_results_are_those_of_the_cpu(operator: str, case: SparseCase) -> None:
    if operator == LOSS and case.page:
        pytest.skip("takes no pages")
    sample = sample_of(operator, case)
    with ops.limits("A2"):
        expected = sample.call(torch.ops.ascend)
        actual = sample.to("npu").call(torch.ops.ascend)
    assert_same_bits(tuple(x.cpu() for x in actual), expected)


@each_operator
@pytest.mark.parametrize(
    ("case", "residual"),
    [
        (BSND, [3, 3]), (TND, [1, 3, 0]), (GIVEN, [1, 3]), (PADDED, [1, 0]),
        (PADDED_GIVEN, [1, 3]),
    ],
    ids=str,
)  # fmt: skip
def test_the_residual_arrives(operator: str, case: SparseCase, residual: list[int]) -> None:
    """Also one that the call leaves out, which the kernel would read as 0."""
    found = arriving(sample_of(operator, case), operator, "cmp_residual_key")
    # A padded batch becomes a pack, without its sequences that have no keys. The loss has one more
    # sequence in a pack: that of the rows behind the last.
    last = [0] if operator == LOSS and case is not BSND else []
    assert found.tolist() == residual + last
    assert found.dtype == torch.int32


@each_operator
def test_no_call_without_a_complete_key(operator: str) -> None:
    sample = sample_of(operator, NO_KEY).to("npu")
    with cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
    assert not [step for step in log if "Indexer" in str(step)]


def test_rows_behind_the_last_sequence_are_one_more() -> None:
    """The kernel looks for a sequence of every row, and finds one without keys."""
    sample = sample_of(LOSS, TAIL)
    for name, ends in (("query", [13, 16, 18]), ("key", [3, 3, 3])):
        assert arriving(sample, LOSS, f"actual_seq_lengths_{name}").tolist() == ends
