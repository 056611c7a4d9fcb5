"""The example of the README on the NPU: the losses of a run on the CPU, to the last bit.

Our operators, their gradients and autograd run on the device. What the model needs beside them
(embeddings, matrix products, normalisation, the optimizer) the simulation does not have: each such
call computes on the CPU, on copies of its arguments (rest_on_cpu.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rest_on_cpu import RestOnCPU

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "warmup-steps": 3, "sparse-steps": 3, "hidden-size": 64, "heads": 4, "head-dim": 32,
    "latent-dim": 64, "rope-dim": 16, "index-heads": 4, "index-dim": 32, "top-k": 16,
    "sequence-length": 96, "eval-windows": 2,
}  # fmt: skip


def trained(device: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The metrics of a run without what it says of itself."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_lightning_indexer  # type: ignore[import-not-found]

    options = {**OPTIONS, "device": device, "out": out}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", [train_lightning_indexer.__file__, *arguments])
    train_lightning_indexer.main()
    metrics: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return {name: x for name, x in metrics.items() if name not in ("seconds", "device")}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The example asks for determinism, of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_leak", "deterministic")
def test_the_losses_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = trained("cpu", tmp_path / "cpu", monkeypatch)
    with RestOnCPU() as mode:
        on_npu = trained("npu", tmp_path / "npu", monkeypatch)
    assert on_npu == on_cpu
    steps, losses = 6, on_npu["history"]["kl"]
    assert len(losses) == steps
    assert len(set(losses)) == steps
    # Every step of every layer, forward and backward; the sparse ones select.
    assert mode.called.keys() == {
        "lightning_indexer.default",
        "sparse_flash_attention.default",
        "sparse_flash_attention_grad.default",
        "sparse_lightning_indexer_grad_kl_loss.default",
    }
    assert min(mode.called.values()) >= steps
