"""Programs with dense attention, and with DeepSeek Sparse Attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense_model
import plain
import pytest
import torch
from dense_model import DenseLM, LanguageModel, train_step
from dsa_model import SparseLM
from support.torch_defects import EXPORT_LOSES_SIZES, NOT_WITH_2_7
from torch import Tensor, nn

LENGTHS = [[9, 40, 41, 64], [30, 64], [1, 2, 63, 64]]


def models(
    dtype: torch.dtype, kind: type[LanguageModel] = DenseLM, **options: bool
) -> tuple[nn.Module, nn.Module]:
    """A model, and the same with the same weights in float64."""
    torch.manual_seed(0)
    model = kind(**options).to(dtype)
    return model, copy.deepcopy(model).double()


def texts(batch: int, length: int) -> Tensor:
    return torch.randint(dense_model.VOCABULARY, (batch, length))


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(DenseLM, torch.float32), (DenseLM, torch.bfloat16), (SparseLM, torch.bfloat16)],
)
def test_training(
    kind: type[LanguageModel], dtype: torch.dtype, checkpoints: bool, expected: Callable[..., Any]
) -> None:
    model, judge = models(dtype, kind, checkpoints=checkpoints)
    text = texts(2, 40)
    plain.assert_close(train_step(model, text), expected(train_step, judge, text), dtype, "loss")
    plain.assert_same_gradients(model, judge, dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_training(compiled: bool, expected: Callable[..., Any]) -> None:
    """With lengths in lists, which change from batch to batch."""
    dtype = torch.bfloat16
    model, judge = models(dtype)
    program = torch.compile(model, fullgraph=True) if compiled else model
    for ends in LENGTHS:
        text = torch.randint(dense_model.VOCABULARY, (ends[-1],))
        loss = train_step(program, text, ends)
        plain.assert_close(loss, expected(train_step, judge, text, ends), dtype, "loss")
    plain.assert_same_gradients(model, judge, dtype)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.smoke)])
def test_compiled(dynamic: bool | None, expected: Callable[..., Any]) -> None:
    """Inference and training: sizes that stay, and sizes that change."""
    dtype = torch.bfloat16 if dynamic else torch.float32
    model, judge = models(dtype)
    program = torch.compile(model, fullgraph=True, dynamic=dynamic)
    sizes = [(2, 40), (3, 33)] if dynamic else [(2, 40)]
    for size in sizes:
        text = texts(*size)
        with torch.no_grad():
            logits = program(text)
            plain.assert_close(logits, expected(judge, text), dtype, "logits")
            plain.assert_close(logits, model(text), dtype, "logits of eager")
        plain.assert_close(
            train_step(program, text), expected(train_step, judge, text), dtype, "loss"
        )
    plain.assert_same_gradients(model, judge, dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [DenseLM, pytest.param(SparseLM, marks=EXPORT_LOSES_SIZES)])
def test_exported(kind: type[LanguageModel], expected: Callable[..., Any], tmp_path: Path) -> None:
    model, judge = models(torch.bfloat16, kind)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (texts(2, 40),), dynamic_shapes=(sizes,))
    torch.export.save(exported, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in ((2, 40), (3, 50)):
        text = texts(*size)
        plain.assert_close(program(text), expected(judge, text), torch.bfloat16, "logits")


@NOT_WITH_2_7
def test_packaged(expected: Callable[..., Any], tmp_path: Path) -> None:
    model, judge = models(torch.float32)
    text = texts(2, 40)
    exported = torch.export.export(model, (text,))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2")
    )
    program = torch._inductor.aoti_load_package(path)
    plain.assert_close(program(text), expected(judge, text), torch.float32, "logits")
