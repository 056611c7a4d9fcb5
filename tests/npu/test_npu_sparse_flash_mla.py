"""sparse_flash_mla on the NPU: the metadata, residuals, strides and lengths of its launch.

The simulation keeps the scalars and a checksum of the lengths in the metadata, and refuses a call
that they do not belong to. It refuses keys whose strides are not dense, as CANN does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cann_simulator
import pytest
import torch
from ascend_attn_check.samples.sparse_flash_mla import (
    DEVICE,
    DEVICE_CASES,
    PAGED_CASES,
    SPARSE_FLASH_MLA,
    MlaCase,
)
from support.samples import Sample
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

FORWARD, METADATA = "aclnnSparseFlashMla", "aclnnSparseFlashMlaMetadata"
PAGED = [case for case in PAGED_CASES if case.d == DEVICE.d]
TND = next(case for case in DEVICE_CASES if case.layout == "TND" and case.kind == "csa")
TAIL = replace(TND, tail=(3, 2, 1))
PADDED = replace(DEVICE, b=2, s=(8, 12, 3), lengths=((8, 8), (12, 5), (3, 1)), page=16)


def launched(sample: Sample) -> tuple[tuple[Tensor, ...], list[tuple[str, dict[str, Any]]]]:
    with cann_simulator.recorded_calls() as log:
        outputs = sample.to("npu").call(torch.ops.ascend)
    calls = [(x["function"], x["arguments"]) for x in log if x.get("phase") == 1]
    return tuple(x.cpu() for x in outputs), [x for x in calls if "SparseFlashMla" in x[0]]


@pytest.mark.parametrize(
    "case", [*DEVICE_CASES, *PAGED, TAIL, PADDED, replace(TAIL, kind="swa", ratio=1)],
    ids=lambda case: case.id,
)  # fmt: skip
def test_bits_are_those_of_the_cpu(case: MlaCase) -> None:
    sample = SPARSE_FLASH_MLA.make(case, torch.bfloat16)
    if case is PADDED:  # The device takes no counts of queries.
        sample = sample.replace(actual_seq_lengths_query=None)
    actual, calls = launched(sample)
    assert_same_bits(actual, sample.call(torch.ops.ascend))
    assert [name for name, _ in calls] == [METADATA, FORWARD]
    metadata, operator = (arguments for _, arguments in calls)
    shared = metadata.keys() & operator.keys() - {"metadata"}
    assert len(shared) > 10
    for name in shared:
        assert metadata[name] == operator[name]


def test_keys_of_any_strides() -> None:
    """CANN compares strides along axes of size 1, too."""
    sample = SPARSE_FLASH_MLA.make(DEVICE, torch.bfloat16)
    expected = sample.call(torch.ops.ascend)

    def strided(x: Tensor) -> Tensor:
        odd = x.transpose(1, 2).contiguous().transpose(1, 2)
        return odd.as_strided(odd.shape, (7, odd.stride(1), 9, 1))

    keys = {name: strided(sample.inputs[name].to("npu")) for name in ("ori_kv", "cmp_kv")}
    actual = sample.to("npu").replace(**keys).call(torch.ops.ascend)
    assert_same_bits(tuple(x.cpu() for x in actual), expected)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("case", [DEVICE, TND], ids=lambda case: case.layout)
def test_residuals(case: MlaCase, given: bool) -> None:
    """The device always gets them, derived without waiting for it."""
    if given:
        case = replace(case, residual=(3,) * len(case.query_counts()))
    sample = SPARSE_FLASH_MLA.make(case, torch.bfloat16)
    actual, calls = launched(sample)
    assert_same_bits(actual, sample.call(torch.ops.ascend))
    assert all(arguments["cmpResidualKvOptional"] for _, arguments in calls)


def test_a_call_without_compressed_keys_is_that_of_a_window() -> None:
    sample = SPARSE_FLASH_MLA.make(replace(DEVICE, b=2, s=(3, 3, 0)), torch.bfloat16)
    _, calls = launched(sample)
    for name, arguments in calls:
        assert arguments["cmpRatio"] == 1
        if name == FORWARD:
            assert arguments["cmpKvOptional"] is None
            assert arguments["cmpSparseIndicesOptional"] is None


def test_pages_have_the_name_of_this_function() -> None:
    _, calls = launched(SPARSE_FLASH_MLA.make(PAGED[0], torch.bfloat16))
    assert {arguments["layoutKvOptional"] for _, arguments in calls} == {"PA_BBND"}


def test_a_gradient_that_may_only_warn_runs_in_a_context_without_determinism(
    set_determinism: Any,
) -> None:
    """CANN refuses it in a deterministic one. Other functions of the pass keep theirs."""
    sample = SPARSE_FLASH_MLA.make(DEVICE, torch.bfloat16)
    set_determinism(True, warn_only=True)
    gradients = []
    for device in ("cpu", "npu"):
        leaf = sample.to(device).requires_grad(("query",))
        with cann_simulator.recorded_calls() as log:
            out, _ = leaf.call(torch.ops.ascend)
            loss = out.float().sum()
            gradients += [x.cpu() for x in torch.autograd.grad(loss, leaf.tensors["query"])]
            torch.npu.synchronize()
    assert_same_bits((gradients[1],), (gradients[0],))
    modes = {x["function"]: x["deterministic"] for x in log if x.get("phase") == 1}
    assert modes[f"{FORWARD}Grad"] == 0
    assert modes[FORWARD] == 1
