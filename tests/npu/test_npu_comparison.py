"""ascend_attn_ops.compare and record where the calls run on the NPU."""

from __future__ import annotations

import re
from pathlib import Path

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.recording import replay
from conftest import TASK_QUEUE
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


@pytest.mark.skipif(TASK_QUEUE == 2, reason="torch_npu captures no graph at level 2")
def test_a_capture_is_refused() -> None:
    query = torch.randn(1, 6, 4, 64, **OPTIONS)
    attend(query)  # builds and keeps the mask, which a capture must not
    expected = re.escape("ascend_attn_ops.compare: a capture of a graph cannot wait")
    with ops.compare() as report:
        graph = torch.npu.NPUGraph()
        with pytest.raises(RuntimeError, match=expected), torch.npu.graph(graph):
            attend(query)
    assert not report.calls
