"""Examples of the README, the docs and the demo run on every device that has the operators."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops._core.device_limits import Device, device_in_force, table
from ascend_attn_ops.torch_npu import stand_in
from ascend_attn_ops.torch_npu.schemas import RELEASE
from support import fresh
from support.checkout import EXAMPLES, ROOT
from support.pages import blocks_of
from support.turns import nightly, seed
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICES = [Device("A2", "9.1"), Device("A2", "8.5"), Device("A3", "9.1")]


def python_blocks(page: Path) -> list[str]:
    return [block.code for block in blocks_of(page)]


# This page lifts the limits throughout and takes long; its own test runs it.
WITHOUT_LIMITS = ROOT / "docs" / "tutorials" / "train_an_indexer.md"

PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if python_blocks(page) and page != WITHOUT_LIMITS
}


def varlen_attn_has_windows() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


# Features that this torch lacks, by the function that an error then names.
MISSING_IN_TORCH = {
    function: what
    for function, there, what in (
        ("enable_dtensor", torch.__version__ >= "2.10", "expected 2.10 or later"),
        (
            "register_flash_attention_impl",
            hasattr(torch.nn.attention, "register_flash_attention_impl"),
            "registry of flash attention",
        ),
        ("varlen_attn", varlen_attn_has_windows(), "varlen_attn with windows"),
    )
    if not there
}


# Pages in English, each for one device by turns; the rest in make test-all.
RUNS = [
    pytest.param(
        name, device, id=f"{name}-{device}",
        marks=() if "zh/" not in name and (number + seed()) % len(DEVICES) == turn else nightly,
    )
    for number, name in enumerate(PAGES)
    for turn, device in enumerate(DEVICES)
]  # fmt: skip


def why_missing(error: Exception, device: Device) -> str:
    """Returns what this torch or the device lacks; raises another error again."""
    for function, what in MISSING_IN_TORCH.items():
        if function in str(error):
            return f"torch {torch.__version__} has no {what}"
    if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
        return "transformers is not installed"
    rows = {row["operator"]: row["devices"] for row in table()}
    if missing := re.match(r"ascend::(\w+): product: expected a product that has", str(error)):
        assert tuple(device) not in rows[missing[1]]
        return f"{device} has no {missing[1]}"
    if str(error).startswith("ascend::lightning_indexer: cmp_ratio: expected"):
        limits = rows["lightning_indexer"][tuple(device)]["limits"]
        assert ("cmp_ratio", "tokens per key", "1") in limits
        return f"{device} has no indexer of compressed keys"
    raise error


@pytest.fixture
def torch_npu_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples want a stand-in in its place, which support.npu_names hides from other tests."""
    if "torch_npu" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch_npu", stand_in._module("torch_npu", RELEASE))


@pytest.mark.usefixtures("torch_npu_as_before")
@pytest.mark.parametrize(("name", "device"), RUNS)
def test_the_examples_of_a_page(
    name: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks share their names, and those with limits of their own keep them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    before = device_in_force()
    assert before is not None
    # Sets the default, not `with limits(...)`: a page may change the default.
    ascend_attn_ops.set_limits(*device)  # type: ignore[arg-type]
    missing = ""
    try:
        for block in blocks_of(PAGES[name]):
            try:
                exec(compile(block.code, name, "exec"), names)
            except NameError:  # what a block before it would have made
                assert missing
            except (RuntimeError, TypeError, ValueError, ModuleNotFoundError) as error:
                if not block.raises:
                    missing = why_missing(error, device)
    finally:
        ascend_attn_ops.set_limits(*before)  # type: ignore[arg-type]
    if missing:
        pytest.skip(missing)


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


def test_every_block_of_the_readme_is_a_script(tmp_path: Path) -> None:
    blocks = python_blocks(ROOT / "README.md")
    assert len(blocks) == 2
    for block in blocks:
        script = tmp_path / "script.py"
        script.write_text(block, encoding="utf-8")
        run_script(script)


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
