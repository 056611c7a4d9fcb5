"""Tensors that arrive at the device, whose kernels misread some arguments as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from arrivals import arrivals, arriving
from ascend_attn_check.samples.sparse import SparseCase
from device_samples import cut_blocks_last, rows_of
from support.samples import OPERATORS, Sample
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

INDEXER, LOSS = "lightning_indexer", "sparse_lightning_indexer_kl_loss_grad"
OF_INT8 = "quant_lightning_indexer"


def sample_of(operator: str, case: SparseCase) -> Sample:
    return OPERATORS[operator].make(case, torch.bfloat16)


# sparse_indices.

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
    sample = sample_of(GRADIENT, replace(case, block=block))
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
    sample = sample_of(operator, case)
    indices = sample.arguments["sparse_indices"].flatten(0, -2)
    assert torch.equal(arriving_rows(sample, operator), indices)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("block", [8, 64])
def test_rows_that_select_nothing_are_zero(layout: str, block: int) -> None:
    """The device writes infinities there, and in the other rows, here, ones."""
    case = SparseCase(s=(9, 30), k=2) if layout == "BSND" else replace(TND, k=2)
    case = replace(case, block=block, pattern="first", absorbed=True)
    sample = sample_of(FORWARD, case)
    with arrivals(FORWARD, "sparse_indices"):
        out = sample.to("npu").call(torch.ops.ascend)[0].cpu().flatten(0, -3)
    nothing = sample.arguments["sparse_indices"].flatten(0, -2)[:, 0] == -1
    assert nothing.any()
    assert (out[nothing] == 0).all()
    tokens = torch.tensor(tokens_of_sequences(sample))
    assert (out[tokens[~nothing[tokens]]] == 1).all()


# Packs in which no query has a key: the device writes outside its outputs for them.

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
WITHOUT_PAIRS = [((0, 0), (0, 0)), ((5, 7, 3), (0, 0, 0)), ((17, 0), (0, 30)), ((0, 4), (3, 0))]
WITH_PAIRS = [((5, 0, 3), (2, 9, 4)), ((0, 1), (0, 1))]


def case_of(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> SparseCase:
    return SparseCase(layout="TND", lengths=lengths, tail=(2, 3), index_d=16)


@pytest.mark.parametrize("operator", [INDEXER, OF_INT8])
@pytest.mark.parametrize("lengths", WITHOUT_PAIRS, ids=str)
@pytest.mark.parametrize("mode", [0, 3])
def test_one_pair_is_launched_and_overwritten(
    operator: str, lengths: tuple[tuple[int, ...], tuple[int, ...]], mode: int
) -> None:
    sample = sample_of(operator, case_of(lengths)).given(sparse_mode=mode)
    for name in LENGTHS:
        assert arriving(sample, operator, name).tolist() == [1] * len(lengths[0])
    indices, *values = sample.to("npu").call(torch.ops.ascend)
    assert (indices == -1).all()
    assert all((x == -torch.inf).all() for x in values)


# With paged keys, lightning_indexer launches such packs.
@pytest.mark.parametrize(("operator", "page"), [(INDEXER, 0), (OF_INT8, 0), (OF_INT8, 16)])
@pytest.mark.parametrize("lengths", [*WITHOUT_PAIRS, *WITH_PAIRS], ids=str)
def test_lengths_on_the_host_need_no_kernels(
    operator: str, page: int, lengths: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    sample = sample_of(operator, replace(case_of(lengths), page=page))
    on_host = {name: sample.arguments[name].cpu() for name in LENGTHS}
    with cann_simulator.recorded_calls() as log:
        outputs = sample.to("npu").replace(**on_host).call(torch.ops.ascend)
        torch.npu.synchronize()
    functions = {entry.get("function") for entry in log}
    assert any(str(x).endswith("LightningIndexer") for x in functions) == (lengths in WITH_PAIRS)
    assert not functions & {"aclnnStack", "aclnnMinimum", "aclnnAmax"}
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))


# Compressed keys: cumulative lengths with a 0, and a residual always.

SIZES = {"heads": 8, "d": 128, "index_heads": 8, "index_d": 128, "k": 512, "ratio": 4}
PACK = SparseCase(layout="TND", **SIZES)
BSND = SparseCase(s=(11, 2), **SIZES)
UNPADDED = replace(PACK, lengths=((13, 3, 8), (3, 0, 2)))
GIVEN = replace(PACK, lengths=((3, 5), (4, 9)), residuals=(1, 3))
PADDED = SparseCase(b=3, s=(13, 4), lengths=((13, 3, 8), (3, 0, 2)), **SIZES)
PADDED_GIVEN = SparseCase(s=(6, 9), lengths=((3, 5), (4, 9)), residuals=(1, 3), **SIZES)
NO_PAIR = SparseCase(s=(6, 2), lengths=((3, 0), (0, 2)), residuals=(1, 3), **SIZES)
NO_KEY = SparseCase(s=(3, 0), **SIZES)
TAIL = replace(PACK, lengths=((13, 3), (3, 0)), tail=(2, 3))
PAGED = replace(PACK, lengths=((1, 3), (75, 32)), residuals=(1, 3), page=16)

each_operator = pytest.mark.parametrize("operator", [INDEXER, LOSS])


@each_operator
@pytest.mark.parametrize(
    "case", [BSND, UNPADDED, GIVEN, PADDED, PADDED_GIVEN, NO_PAIR, NO_KEY, TAIL, PAGED],
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
        (BSND, [3, 3]), (UNPADDED, [1, 3, 0]), (GIVEN, [1, 3]), (PADDED, [1, 0]),
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


# Masks beside pre_tokens and next_tokens in sparse_mode 0. The device uses the tokens to leave out
# whole tiles only, so the mask that arrives has to mask what they exclude.

B, N, SQ, SKV, D = 2, 3, 7, 9, 16
ENDS, KEY_ENDS = [4, 4, 9], [6, 9, 14]


def outside(queries: int, keys: int, pre: int, following: int) -> Tensor:
    """The pairs of query and key that the tokens exclude."""
    excluded = [
        [key < query - pre or key > query + following for key in range(keys)]
        for query in range(queries)
    ]
    return torch.tensor(excluded)


def masked(layout: str, mask: Tensor, **options: Any) -> Sample:
    tokens = (B, SQ), (B, SKV)
    if layout == "TND":
        tokens = ENDS[-1:], KEY_ENDS[-1:]
        options |= {
            "actual_seq_lengths_query": list(ENDS), "actual_seq_lengths_key": list(KEY_ENDS)
        }  # fmt: skip
    torch.manual_seed(0)
    query, key = (torch.randn(*x, N, D).half() for x in tokens)
    options = {"num_heads": N, "layout": layout, "scale_value": 0.25, **options}
    inputs = {"query": query, "key": key, "value": key}
    return Sample("flash_attention_score", layout, inputs, {"atten_mask": mask, **options})


def gradient_of(sample: Sample) -> Sample:
    out, softmax_max, softmax_sum = sample.call(torch.ops.ascend)
    inputs = {
        **sample.inputs, "dy": out, "softmax_max": softmax_max, "softmax_sum": softmax_sum,
        "attention_in": out,
    }  # fmt: skip
    return Sample("flash_attention_score_grad", sample.id, inputs, sample.options)


MASKS = [(SQ, SKV), (1, 1, SQ, SKV), (B, 1, SQ, SKV), (B, N, SQ, SKV)]
TOKENS = [(2, 3), (2, 100), (100, 0), (-1, 4), (5, -2), (2**31 - 1, 1), (0, 2**62)]


def assert_arrives(sample: Sample, expected: Tensor) -> None:
    for call in (sample, gradient_of(sample)):
        mask = arriving(call, call.operator, "atten_mask")
        assert torch.equal(mask.bool(), expected.bool())


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize(("pre", "following"), TOKENS)
def test_the_mask_has_the_band(shape: tuple[int, ...], pre: int, following: int) -> None:
    mask = torch.rand(shape) < 0.3
    sample = masked("BSND", mask.byte(), pre_tokens=pre, next_tokens=following)
    assert_arrives(sample, mask | outside(SQ, SKV, pre, following))


def test_a_mask_of_a_whole_pack() -> None:
    """The mask is (sum Sq, sum Skv); every sequence counts from its own first token."""
    mask = torch.rand(ENDS[-1], KEY_ENDS[-1]) < 0.3
    sample = masked("TND", mask, pre_tokens=3, next_tokens=1)
    for call in (sample, gradient_of(sample)):
        found = arriving(call, call.operator, "atten_mask")
        for (q0, q1), (k0, k1) in zip(pairwise([0, *ENDS]), pairwise([0, *KEY_ENDS]), strict=True):
            expected = mask[q0:q1, k0:k1] | outside(5, 6, 3, 1)[: q1 - q0, : k1 - k0]
            assert torch.equal(found[q0:q1, k0:k1], expected)


@pytest.mark.parametrize("mode", [0, 1])
def test_a_mask_that_needs_no_band_arrives_as_it_is(mode: int) -> None:
    """The tokens of mode 0 exclude nothing; mode 1 does not read them."""
    mask = torch.rand(SQ, SKV) < 0.3
    tokens = {"pre_tokens": SQ - 1, "next_tokens": SKV - 1} if mode == 0 else {"pre_tokens": 1}
    assert_arrives(masked("BSND", mask, sparse_mode=mode, **tokens), mask)
