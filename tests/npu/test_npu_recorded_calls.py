"""The NPU path gives, from its launch to its results, what CANN's own kernels gave.

`check --recorded` compares them in two columns, which tell where a difference comes from.
"""

from __future__ import annotations

from pathlib import Path

import cann_simulator
import pytest
from ascend_attn_check import child, recorded_kernels, results
from ascend_attn_check.kernel_calls import KernelCall
from ascend_attn_check.probe import Context, Probe
from check_faults import CHANGES
from support.recorded_calls import FILE, recorded_calls
from support.simulated_npu import once
from support.tolerance import assert_same_bits
from support.turns import nightly
from test_npu_check import check, environment

pytestmark = pytest.mark.skipif(
    not FILE.exists(), reason="a source distribution has no recorded calls"
)

CONTEXT = Context("npu:0", recorded=FILE.parent)
KERNEL = "aclnnSparseFlashAttention"


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("call", recorded_calls(), ids=lambda call: call.id)
def test_same_as_the_kernel(call: KernelCall) -> None:
    """tests/operators/test_recorded_calls.py compares the CPU's results with the kernels'."""
    expected, actual = call.run("cpu"), call.run("npu")
    assert_same_bits(tuple(actual.values()), tuple(expected.values()))


def of_kernel() -> KernelCall:
    """The first recorded call of sparse_flash_attention that is within the limits."""
    return next(
        call for call in recorded_calls()
        if call.sample.operator == "sparse_flash_attention" and not CONTEXT.refusal(call.sample)
    )  # fmt: skip


def line(call: KernelCall) -> results.Result:
    def run(context: Context) -> object:
        return recorded_kernels._run(call, context)

    probe = Probe(recorded_kernels.SECTION, call.id, call.id, run)  # type: ignore[arg-type]
    return child.run(probe, CONTEXT)


def test_both_columns_notice_a_fault_of_the_device() -> None:
    call = of_kernel()
    assert line(call).verdict == "pass"
    with cann_simulator.altered(KERNEL, tensors={"softmaxSum": CHANGES["slightly off"]}):
        found = line(call)
    assert found.verdict == "differs"
    assert found.text.startswith("it differs from both: a finding about the device; ")
    assert "softmax_sum: from the recording " in found.text
    assert "softmax_sum: from the CPU 0.001 of the maximum, 100.0" in found.text


@once
@pytest.mark.parametrize("product", ["A2", pytest.param("A3", marks=nightly)])
def test_the_simulated_device_repeats_the_recorded_calls(product: str, tmp_path: Path) -> None:
    only = ("--quick", "--only", recorded_kernels.SECTION, "--recorded", FILE.parent)
    status, found = check(tmp_path, environment(product), *only)
    assert status == 0
    assert len(found) == len(recorded_calls())
    assert {x.verdict for x in found.values()} <= {"pass", "refused"}
    assert all(x.text for x in found.values())
    passed = [x for x in found.values() if x.verdict == "pass"]
    assert all(x.figures.keys() == {"recording", "CPU"} for x in passed)
    assert len({x.id.split("/")[1].split("-")[0] for x in passed}) == 6


@once
def test_another_product_has_other_kernels(tmp_path: Path) -> None:
    only = ("--only", recorded_kernels.SECTION, "--recorded", FILE.parent)
    status, found = check(tmp_path, environment("310P"), *only)
    assert status == 0
    assert {x.text for x in found.values()} == {"the recorded kernels are those of A2 and A3"}
