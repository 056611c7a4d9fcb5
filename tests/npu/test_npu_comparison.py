"""ascend_attn_ops.compare and record where the calls run on the NPU."""

from __future__ import annotations

import re
from pathlib import Path

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.recording import replay
from support.simulated_npu import captured, once, run_in_new_process
from torch import Tensor

OPTIONS = {"dtype": torch.bfloat16, "device": "npu"}


def attend(query: Tensor, num_heads: int = 4) -> Tensor:
    key = torch.ones(1, 9, 2, 64, **OPTIONS)
    return ops.flash_attention_score(query, key, key, num_heads=num_heads, layout="BSND")[0]


def test_forward_and_backward_are_compared() -> None:
    query = torch.randn(1, 6, 4, 64, **OPTIONS).requires_grad_()
    with ops.compare() as report:
        attend(query).sum().backward()
    assert report.compared == {"flash_attention_score": 1, "flash_attention_score_grad": 1}
    assert not report.differences, report
    assert query.grad is not None
    assert query.grad.device.type == "npu"


def test_a_recorded_call_replays_on_either_device(tmp_path: Path) -> None:
    query = torch.randn(1, 6, 4, 64, **OPTIONS)
    with ops.record(tmp_path, when="always") as files:
        attend(query)
    for device in ("cpu", "npu"):
        outcome = replay(files[0], device)
        assert outcome.difference is None
        assert outcome.same_as_recorded
        assert "CANN" in outcome.recorded.versions


def test_an_error_on_the_npu_is_recorded(tmp_path: Path) -> None:
    query = torch.randn(1, 6, 4, 64, **OPTIONS)
    with ops.record(tmp_path) as files, pytest.raises(ValueError, match="num_heads"):
        attend(query, num_heads=3)
    assert replay(files[0], "npu").same_as_recorded


@captured
def test_a_capture_is_refused() -> None:
    query = torch.randn(1, 6, 4, 64, **OPTIONS)
    attend(query)  # builds and keeps the mask, which a capture must not
    expected = re.escape("ascend_attn_ops.compare: a capture of a graph cannot wait")
    with ops.compare() as report:
        graph = torch.npu.NPUGraph()
        with pytest.raises(RuntimeError, match=expected), torch.npu.graph(graph):
            attend(query)
    assert not report.calls


# A device whose gradient errs in one element, in a training script and where a file is replayed.
FAULTY = """
import sys, cann_simulator, torch, torch_npu, ascend_attn_ops as ops
from ascend_attn_ops.__main__ import main

def err(x):
    x.view(-1)[5] += 1

faulty = cann_simulator.altered("aclnnFlashAttentionScoreGradV2", tensors={"dqOut": err})
"""
TRAINING = """
torch.manual_seed(3)
projection = torch.nn.Linear(64, 64, dtype=torch.bfloat16).npu()
key = torch.randn(1, 9, 2, 64, dtype=torch.bfloat16).npu()
with faulty, ops.record(FOLDER, when="differs") as files:
    query = projection(torch.randn(1, 6, 4, 64, dtype=torch.bfloat16).npu())
    out = ops.flash_attention_score(query, key, key, num_heads=4, layout="BSND")[0]
    out.float().square().mean().backward()
(file,) = files
print(file)
"""
REPLAY = """
with faulty:
    main(["check", "--device", DEVICE, "--replay", FILE])
"""


@once
def test_a_failing_training_call_replays_to_the_same_in_a_fresh_process(tmp_path: Path) -> None:
    output, _ = run_in_new_process(f"{FAULTY}FOLDER = {str(tmp_path)!r}\n{TRAINING}")
    file = output.splitlines()[-1]
    given = {}
    for device in ("npu:0", "cpu"):
        names = f"FILE, DEVICE = {file!r}, {device!r}\n"
        given[device], _ = run_in_new_process(f"{FAULTY}{names}{REPLAY}")
    assert "flash_attention_score_grad, called at " in given["npu:0"]
    assert "here, against the reference: dq: 1 of " in given["npu:0"]
    assert given["npu:0"].rstrip().endswith("here: the recorded bits")
    # The CPU is right, so the difference is the device's.
    assert "here, against the reference: within the bounds" in given["cpu"]
