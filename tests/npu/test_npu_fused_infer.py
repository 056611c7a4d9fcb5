"""fused_infer_attention_score on every device: V4 of CANN's function, V5 on Ascend 950.

The simulation marks rows without keys as the device does, and ignores for decoding what the device
ignores, so that each of these fails without what the launch does about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cann_simulator
import pytest
import torch
from ascend_attn_check.samples import fused_infer_attention_score as samples
from ascend_attn_check.samples.fused_infer_attention_score import InferCase
from support.samples import Sample
from support.simulated_npu import DEVICE, first_phases
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits", "no_leak")

FUNCTION = f"aclnnFusedInferAttentionScoreV{5 if DEVICE[0] == '950' else 4}"
ONE_QUERY = InferCase(b=3, s=(1, 9), heads=(4, 2), lse=True)
PAGED = replace(ONE_QUERY, s=(1, 0), lengths=(None, (40, 0, 33)), pages="rows", layout="BSND")

DECODING = [
    ONE_QUERY, replace(ONE_QUERY, lengths=((1, 0, 1), (9, 4, 0)), layout="BSH"),
    replace(ONE_QUERY, lengths=((1, 0, 1), (9, 4, 0)), sink="query"),
    replace(ONE_QUERY, mode=2, lengths=(None, (9, 4, 0))),
    replace(ONE_QUERY, mode=3, lengths=((1, 0, 1), (9, 4, 5)), layout="BSND"),
    replace(ONE_QUERY, pre=8, next=-3, lengths=(None, (9, 4, 3)), mode=4),
    replace(ONE_QUERY, mode=4, pre=4, next=0, lengths=((1, 1, 0), (9, 4, 6))),
    replace(ONE_QUERY, mask="BS", pre=-2, next=5),
    replace(ONE_QUERY, mask="B1S", larger=(2, 3), next=4, pre=0),
    replace(ONE_QUERY, mask="S", next=0), replace(ONE_QUERY, mask="S", mode=1, layout="BNSD_BSND"),
    PAGED, replace(PAGED, mode=3, lengths=((0, 1, 1), (40, 16, 33)), sink="float32"),
    replace(PAGED, mask="S", mask_dtype=torch.int8),
]  # fmt: skip
# Rows without keys, in every way that a call can have them.
WITHOUT_KEYS = [
    InferCase(s=(9, 4), mode=3, lse=True), InferCase(s=(9, 4), mode=3, lse=True, sink="float32"),
    InferCase(s=(9, 12), lengths=((7, 2), (12, 0)), lse=True, sink="query", layout="BSH"),
    InferCase(s=(9, 12), mask="BS", lse=True, sink="query", layout="BSND"),
    InferCase(s=(9, 12), mask="BS", lse=True, layout="BSND_BNSD"),
    InferCase(s=(9, 12), mode=4, pre=-3, next=20, lse=True, sink="query"),
    InferCase(layout="TND", lengths=((3, 5), (0, 2)), mode=3, lse=True, sink="query"),
    InferCase(layout="TND", lengths=((3, 5), (0, 2)), mode=3, lse=True),
]  # fmt: skip


def launched(sample: Sample) -> tuple[tuple[Tensor, ...], list[dict[str, Any]]]:
    with cann_simulator.recorded_calls() as log:
        outputs = sample.to("npu").call(torch.ops.ascend)
    return tuple(x.cpu() for x in outputs), first_phases(log, FUNCTION)


@pytest.mark.parametrize(
    "case", [*samples.CASES, *DECODING, *WITHOUT_KEYS], ids=lambda case: case.id
)
def test_bits_are_those_of_the_cpu(case: InferCase) -> None:
    sample = samples.build(case, torch.bfloat16)
    expected = sample.call(torch.ops.ascend)
    actual, calls = launched(sample)
    assert_same_bits(actual, expected)
    inputs = sample.inputs
    assert len(calls) == (inputs["query"].numel() > 0 and inputs["key"].numel() > 0)


@pytest.mark.parametrize(
    ("case", "given", "asked"),
    [
        (InferCase(), 1, 1), (InferCase(mask="BS"), 0, 2), (InferCase(mask="BS"), 1, 3),
        (InferCase(mask="BS", sink="query"), 0, 0), (InferCase(mode=3), 0, 0),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_a_mask_masks_whole_are_corrected(
    case: InferCase, given: int, asked: int
) -> None:
    sample = samples.build(case, torch.float16).given(inner_precise=given)
    _, (call,) = launched(sample)
    assert call["innerPrecise"] == asked


def test_a_sink_has_the_dtype_of_the_query() -> None:
    _, (call,) = launched(samples.build(InferCase(sink="float32"), torch.float16))
    assert call["learnableSinkOptional"]["dtype"] == call["query"]["dtype"]


def test_one_head_of_absorbed_attention_is_said() -> None:
    case = InferCase(s=(1, 0), lengths=(None, (40, 33)), heads=(1, 1), d=512, rope=64, pages="rows")
    sample = samples.build(case, torch.bfloat16)
    assert sample.options["num_key_value_heads"] == 0
    _, (call,) = launched(sample)
    assert call["numKeyValueHeads"] == 1


def test_lengths_and_pages_arrive() -> None:
    case = replace(PAGED, s=(3, 0), lengths=((3, 1, 2, 9), (40, 3, 33)))
    _, (call,) = launched(samples.build(case, torch.float16))
    assert call["actualSeqLengthsOptional"] == [3, 1, 2]
    assert call["actualSeqLengthsKvOptional"] == [40, 3, 33]
    assert call["blockSize"] == 16
    assert call["softmaxLseFlag"] is True


def test_a_band_that_key_lengths_cannot_express() -> None:
    """A mask of one row per batch stands for it, which an updated graph has no memory for."""
    case = replace(ONE_QUERY, mode=4, pre=3, next=0, lse=False, lengths=(None, (9, 4, 0)))
    sample = samples.build(case, torch.float16)
    actual, (call,) = launched(sample)
    torch.testing.assert_close(actual, sample.call(torch.ops.ascend))
    assert call["sparseMode"] == 1
    assert call["attenMaskOptional"]["sizes"] == [3, 1, 9]
    on_npu = sample.to("npu")
    out = [torch.zeros_like(on_npu.inputs["query"]), torch.zeros(0, device="npu")]
    with pytest.raises(NotImplementedError, match="pre_tokens: expected a band from key 0 on"):
        torch.ops.ascend.fused_infer_attention_score.relaunch(
            **on_npu.arguments, out=out, workspace=torch.empty(0, dtype=torch.uint8, device="npu")
        )
