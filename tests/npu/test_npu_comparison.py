"""ascend_attn_ops.compare and record where the calls run on the NPU."""

from __future__ import annotations

import re
from pathlib import Path

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_ops.debug.recording import replay
from support.simulated_npu import captured
from torch import Tensor

OPTIONS = {"dtype": torch.bfloat16, "device": "npu"}


def attend(query: Tensor) -> Tensor:
    key = torch.ones(1, 9, 2, 64, **OPTIONS)
    return ops.flash_attention_score(query, key, key, num_heads=4, layout="BSND")[0]


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


def test_an_error_of_the_device_is_recorded_and_is_none_of_the_cpu(tmp_path: Path) -> None:
    query = torch.randn(1, 6, 4, 64, **OPTIONS).requires_grad_()
    faulty = {"dqOut": lambda x: x.view(-1)[5].add_(1)}
    with cann_simulator.altered("aclnnFlashAttentionScoreGradV2", tensors=faulty):
        with ops.record(tmp_path, when="differs") as files:
            attend(query).float().square().mean().backward()
        outcome = replay(files[0], "npu")
    assert outcome.same_as_recorded
    assert "dq: 1 of " in str(outcome.difference)
    assert replay(files[0], "cpu").difference is None
