"""Programs with DeepSeek Sparse Attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dsa_model
import plain
import pytest
import torch
from dsa_model import SparseLM, train_step


@pytest.mark.parametrize("checkpoints", [False, True])
def test_training(checkpoints: bool, expected: Callable[..., Any]) -> None:
    model = SparseLM(checkpoints).bfloat16()
    judge = copy.deepcopy(model).double()
    text = torch.randint(dsa_model.VOCABULARY, (2, 24))
    plain.assert_close(
        train_step(model, text), expected(train_step, judge, text), torch.bfloat16, "loss"
    )
    plain.assert_same_gradients(model, judge, torch.bfloat16)


@pytest.mark.smoke
def test_exported(expected: Callable[..., Any], tmp_path: Path) -> None:
    model = SparseLM().bfloat16()
    judge = copy.deepcopy(model).double()
    example = torch.randint(dsa_model.VOCABULARY, (2, 24))
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (example,), dynamic_shapes=(sizes,))
    torch.export.save(exported, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    text = torch.randint(dsa_model.VOCABULARY, (3, 30))
    plain.assert_close(program(text), expected(judge, text), torch.bfloat16, "logits")
