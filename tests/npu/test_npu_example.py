"""The examples on the NPU: the losses and the decoded text of a run on the CPU, to the last bit.

Our operators and their gradients are calls of aclnn. The simulation computes the rest of the
model on the CPU (embeddings, matrix products, normalisation, the optimizer).
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from support.simulated_npu import attention_functions, once

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "warmup-steps": 3, "sparse-steps": 3, "hidden-size": 64, "heads": 4, "head-dim": 32,
    "latent-dim": 64, "rope-dim": 16, "index-heads": 4, "index-dim": 32, "top-k": 16,
    "sequence-length": 96, "eval-windows": 2, "dtype": "bfloat16",
}  # fmt: skip

DEEPSEEK_V4 = {
    "steps": 3, "batch-size": 1, "sequence-length": 48, "hidden-size": 32, "heads": 2,
    "head-dim": 16, "window": 8, "hca-ratio": 8, "index-heads": 4, "index-dim": 16, "top-k": 4,
    "eval-windows": 1, "log-every": 1,
}  # fmt: skip


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, options: dict[str, Any]) -> None:
        arguments = [f"--{option}={value}" for option, value in options.items()]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(name).main()

    return run


def trained(run_example: Callable[..., None], device: str, out: Path) -> dict[str, Any]:
    """Returns the metrics of a run, without its time and device."""
    run_example("train_lightning_indexer", {**OPTIONS, "device": device, "out": out})
    metrics: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return {name: x for name, x in metrics.items() if name not in ("seconds", "device")}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The example asks for determinism, of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@once
@pytest.mark.usefixtures("no_leak", "deterministic")
def test_the_examples_do_what_they_do_on_the_cpu(
    tmp_path: Path, run_example: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_cpu = trained(run_example, "cpu", tmp_path / "cpu")
    with cann_simulator.recorded_calls() as calls:
        on_npu = trained(run_example, "npu", tmp_path / "npu")
    assert on_npu == on_cpu
    steps, losses = 6, on_npu["history"]["kl"]
    assert len(losses) == steps
    assert len(set(losses)) == steps
    # Every step of every layer, forward and backward; the sparse ones select.
    functions = attention_functions(calls)
    assert functions.keys() == {
        "aclnnLightningIndexer", "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionGrad",
        "aclnnSparseLightningIndexerGradKLLoss",
    }  # fmt: skip
    assert min(functions.values()) >= steps

    options = {
        "checkpoint": tmp_path / "cpu" / "checkpoint.pt", "dtype": "bfloat16",
        "sequences": 3, "prompt": 60, "new": 6, "contexts": 48, "text": 6,
    }  # fmt: skip
    texts = []
    for device in ("cpu", "npu"):
        capsys.readouterr()
        # The laptop's sizes are none of the NPU's.
        with ascend_attn_ops.limits(None), cann_simulator.recorded_calls() as calls:
            run_example("paged_decode", {**options, "device": device})
        text = capsys.readouterr().out
        texts.append([line for line in text.splitlines() if "tokens/s" not in line])
    assert texts[0] == texts[1]
    assert any("3 of 3 sequences equal" in line for line in texts[0])
    functions = attention_functions(calls)
    int8 = {"aclnnQuantLightningIndexer", "aclnnKvQuantSparseFlashAttention"}
    assert functions.keys() > {"aclnnScatterPaKvCache", *int8}


@once
def test_training_deepseek_v4(tmp_path: Path, run_example: Callable[..., None]) -> None:
    """Autocast rounds other operators of torch on an NPU than on the CPU, so results are close."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    metrics = []
    for device in ("cpu", "npu"):
        options = {**DEEPSEEK_V4, "device": device, "out": tmp_path / device}
        with cann_simulator.recorded_calls() as calls:
            run_example("train_deepseek_v4", options)
        metrics.append(json.loads((tmp_path / device / "metrics.json").read_text()))
    on_cpu, on_npu = metrics
    assert on_npu["captured_mass"]["before"] == on_cpu["captured_mass"]["before"]
    for name, tolerance in (("bits_per_byte", 1e-2), ("indexer_loss", 0.2)):
        assert len(set(on_npu["history"][name])) == 3
        assert on_npu["history"][name] == pytest.approx(on_cpu["history"][name], rel=tolerance)
    # Two of the four layers select keys.
    functions = attention_functions(calls)
    assert functions["aclnnSparseFlashMla"] == functions["aclnnSparseFlashMlaGrad"] == 3 * 4
    assert functions["aclnnLightningIndexerV2"] == 3 * 2
    assert functions["aclnnSparseLightningIndexerKLLossGrad"] == 3 * 2


@once
def test_serving_with_pages(
    run_example: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the NPU's limits, in bfloat16, with the tokens of generate() on the NPU."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    options = {
        "device": "npu", "requests": 4, "prompt": 150, "new": 8, "every": 2, "batch": 3,
        "budget": 64, "blocks": 5,
    }  # fmt: skip
    with cann_simulator.recorded_calls() as calls:
        run_example("serve_with_pages", options)
    printed = capsys.readouterr().out
    assert "4 of 4 requests have the tokens of generate()" in printed
    assert "0 running,  5 blocks free" in printed
    functions = attention_functions(calls)
    assert functions["aclnnScatterPaKvCache"] == functions["aclnnFusedInferAttentionScoreV4"] > 0
