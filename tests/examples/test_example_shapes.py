"""The scripts of README and of the first steps, and the sizes of the demo on devices."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops._core.device_limits import Device
from support import fresh
from support.checkout import EXAMPLES, ROOT
from support.pages import blocks_of
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICES = [Device("A2", "9.1"), Device("A2", "8.5"), Device("A3", "9.1")]


def python_blocks(page: Path) -> list[str]:
    return [block.code for block in blocks_of(page)]


def statements(code: str) -> tuple[set[str], list[str]]:
    """The imports, in any order, and the rest but for a docstring."""
    body = ast.parse(code).body[ast.get_docstring(ast.parse(code)) is not None :]
    imports = {ast.dump(x) for x in body if isinstance(x, ast.Import | ast.ImportFrom)}
    return imports, [ast.dump(x) for x in body if ast.dump(x) not in imports]


def run_script(script: Path) -> None:
    result = fresh.python(str(script))
    assert result.status == 0, result.err


def test_a_script_has_the_examples_of_first_steps() -> None:
    blocks = "\n".join(python_blocks(ROOT / "docs" / "first_steps.md"))
    assert statements((EXAMPLES / "first_steps.py").read_text()) == statements(blocks)
    run_script(EXAMPLES / "first_steps.py")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The demo's module, with the process as the demo sets it up."""
    pytest.importorskip("matplotlib", reason="the example draws with matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("train_lightning_indexer")
    module.set_up_device("cpu")
    yield module
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("phase", ["dense", "sparse"])
def test_device_shapes_of_the_demo(demo: Any, phase: str, device: Device) -> None:
    """A training step of each phase, forward and backward, without the memory of its tensors."""
    shapes = dict(demo.DEVICE_SHAPES)
    length = shapes.pop("sequence_length")
    config = replace(demo.ModelConfig(layers=1, hidden_size=64, head_dim=32), **shapes)
    select = demo.select_all if phase == "dense" else demo.select_by_indexer
    with FakeTensorMode(), ascend_attn_ops.limits(*device):  # type: ignore[arg-type]

        def step() -> None:
            model = demo.SparseLM(config)
            text = torch.zeros(2, length + 1, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16):
                lm_loss, kl_loss = model(text, select)
            (lm_loss + kl_loss).backward()
            assert all(parameter.grad is not None for parameter in model.parameters())

        if (phase, device) == ("dense", Device("A2", "8.5")):
            # The dense phase selects all keys: K = 4096. CANN 8.5 trains with K = 2048 only, and
            # with 2048 tokens the sparse phase would select all keys, too.
            with pytest.raises(ValueError, match=r"K \(.*\) to be 2048 on Ascend A2 with CANN 8.5"):
                step()
        else:
            step()
