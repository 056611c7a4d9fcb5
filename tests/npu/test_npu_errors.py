"""A failure of the device reaches the user in one readable line, and the process goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cann_simulator
import pytest
import torch
import torch_npu
from ascend_attn_check.samples.flash_attention_score import FlashCase, build
from ascend_attn_ops import _C, check_values
from ascend_attn_ops._core.device_limits import table
from device_samples import first
from support.samples import OPERATORS
from support.simulated_npu import TASK_QUEUE, once, run_in_new_process
from support.tolerance import assert_same_bits
from support.turns import nightly

ATTENTION = "sparse_flash_attention"


@pytest.mark.skipif(TASK_QUEUE == 2, reason="the first phase runs on the queue's thread")
@pytest.mark.parametrize(
    ("status", "shown"), [(161002, "ACLNN_ERR_PARAM_INVALID 161002"), (507015, "507015")]
)
def test_a_failure_is_one_line(status: int, shown: str) -> None:
    """test_npu_faults.py: of every function, and what is left behind."""
    sample = first(ATTENTION).make(torch.bfloat16).to("npu")
    line = f"ascend::{ATTENTION}: aclnnSparseFlashAttentionGetWorkspaceSize: EZ1001: head size"
    with (
        cann_simulator.fail(phase=1, status=status, message="EZ1001: head size\n[PID: 7]"),
        pytest.raises(RuntimeError, match=re.escape(f"{line} [PID: 7] [{shown}]") + "$"),
    ):
        sample.call(torch.ops.ascend)


def test_a_value_of_its_own() -> None:
    """The device reads key in its place: the checked mode compares them."""
    sample = first(ATTENTION).make(torch.bfloat16)
    equal, other = (sample.replace(value=factor * sample.inputs["key"]) for factor in (1, 2))
    outputs = tuple(x.cpu() for x in equal.to("npu").call(torch.ops.ascend))
    assert_same_bits(outputs, sample.call(torch.ops.ascend))
    with check_values():
        equal.to("npu").call(torch.ops.ascend)
        with pytest.raises(ValueError, match="value: expected key's numbers"):
            other.to("npu").call(torch.ops.ascend)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (ATTENTION, "key"), (ATTENTION, "sparse_indices"), (ATTENTION, "query_rope"),
        ("attention_update", "lse[0]"), ("attention_update", "local_out[2]"),
    ],
)  # fmt: skip
def test_a_tensor_on_another_device(operator: str, name: str) -> None:
    sample = first(operator).make(torch.bfloat16).to("npu:0")
    for device in ("npu:1", "cpu"):
        elsewhere = sample.tensors[name].to(device)
        with pytest.raises(ValueError, match=rf"{re.escape(name)}.*device"):
            sample.replace(**{name: elsewhere}).call(torch.ops.ascend)


# Prints the device in force, and what becomes of a call.
CALL = f"""
    import torch, ascend_attn_ops
    from ascend_attn_ops._core.device_limits import device_in_force
    from device_samples import first
    print(device_in_force())
    sample = first("{ATTENTION}").make(torch.bfloat16).to("npu")
    try:
        sample.call(torch.ops.ascend)
        print("accepted")
    except NotImplementedError as error:
        print(error)
"""


@once
def test_missing_function(tmp_path: Path) -> None:
    """A CANN without an operator library."""
    for folder in os.environ["LD_LIBRARY_PATH"].split(os.pathsep):
        for library in Path(folder).glob("lib*.so"):
            if library.name != "libopapi.so":
                (tmp_path / library.name).symlink_to(library)
    text, _ = run_in_new_process(CALL, LD_LIBRARY_PATH=str(tmp_path))
    assert "aclnnSparseFlashAttention: is not in this CANN" in text


@once
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "950" else nightly) for x, _ in _C.products]
)
def test_product(name: str) -> None:
    environment = cann_simulator.environment(task_queue=TASK_QUEUE, product=name)
    text, _ = run_in_new_process(CALL, **environment)
    in_force, outcome = text.strip().splitlines()[-2:]
    assert in_force == f"Ascend {name} with CANN 9.1"
    (row,) = (row for row in table() if row["operator"] == ATTENTION)
    assert (outcome == "accepted") == ((name, "9.1") in row["devices"])
    if outcome != "accepted":
        assert "product" in outcome


@once
def test_310p() -> None:
    """Its own limits: no bfloat16."""
    text, _ = run_in_new_process(
        """
        import torch, ascend_attn_ops
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.ones(1, 2, 3, 16, dtype=dtype).npu()
            try:
                out = ascend_attn_ops.prompt_flash_attention(x, x, x, num_heads=2, layout="BNSD")
                print((out.cpu() == 1).all().item())
            except TypeError as error:
                print(error)
        """,
        **cann_simulator.environment(task_queue=TASK_QUEUE, product="310P"),
    )
    half, bfloat16 = text.strip().splitlines()[-2:]
    assert half == "True"
    assert "query: expected dtype float16 on Ascend 310P, got bfloat16" in bfloat16


@pytest.mark.parametrize(
    ("operator", "name"), [(ATTENTION, "query"), ("attention_update", "local_out[1]")]
)
def test_a_private_format_is_refused(operator: str, name: str) -> None:
    """Its elements are in blocks: read by strides they would be plausible and wrong."""
    sample = first(operator).make(torch.bfloat16).to("npu")
    given = sample.tensors[name]
    nz = 29
    torch.npu.config.allow_internal_format = True
    try:
        private = torch_npu.empty_with_format(
            tuple(given.shape), dtype=given.dtype, device="npu", acl_format=nz
        )
    finally:
        torch.npu.config.allow_internal_format = False
    with (
        cann_simulator.recorded_calls() as log,
        pytest.raises(ValueError, match=r"private format 29"),
    ):
        sample.replace(**{name: private}).call(torch.ops.ascend)
    assert not any("function" in entry for entry in log)


@once
def test_report() -> None:
    """`python -m ascend_attn_ops` says what it runs on and that every function is there."""
    command = [sys.executable, "-m", "ascend_attn_ops"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Ascend910B2" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if " aclnn" in line]
    assert {row[0] for row in rows} == {row["operator"] for row in table()}
    printed = sorted(row[-1] for row in rows)
    assert printed == sorted(function for row in table() for function in row["aclnn"])
    for name, *works in ((*row[:5], row[-1]) for row in rows):
        autograd = "no" if OPERATORS[name].inference_only else "yes"
        function = works.pop()
        launched = "of" if function == "aclnnFusedInferAttentionScoreV5" else "yes"
        assert works == ["yes", "yes", autograd, launched], function  # V5: of another product


def test_pse_shift_has_no_gradient_on_the_device() -> None:
    """DECISION: aclnn leaves dpse alone; zeros, or what was in memory, are no gradient."""
    sample = build(FlashCase(pse="full"), torch.bfloat16).to("npu")
    with pytest.raises(
        NotImplementedError, match=r"^ascend::flash_attention_score: pse_shift: .* detach it"
    ):
        sample.requires_grad(("query", "pse_shift")).call(torch.ops.ascend)
    assert sample.requires_grad(("query",)).call(torch.ops.ascend)[0].requires_grad
