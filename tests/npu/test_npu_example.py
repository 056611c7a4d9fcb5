"""The examples on the NPU: the losses and the decoded text of a run on the CPU, to the last bit.

Our operators and their gradients are calls of aclnn. The simulation computes the rest of the
model on the CPU (embeddings, matrix products, normalisation, the optimizer).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from support.simulated_npu import attention_functions, on_ranks, once
from support.turns import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "warmup-steps": 3, "sparse-steps": 3, "hidden-size": 64, "heads": 4, "head-dim": 32,
    "latent-dim": 64, "rope-dim": 16, "index-heads": 4, "index-dim": 32, "top-k": 16,
    "sequence-length": 96, "eval-windows": 2, "dtype": "bfloat16",
}  # fmt: skip

TRANSFORMERS = {
    "layers": 2, "hidden-size": 32, "heads": 2, "head-dim": 16, "latent-dim": 32, "rope-dim": 16,
    "index-heads": 4, "index-dim": 32, "top-k": 12, "sequence-length": 48, "eval-windows": 2,
    "pretrain-steps": 6, "warmup-steps": 3, "sparse-steps": 3, "log-every": 1,
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
        "aclnnLightningIndexer",
        "aclnnSparseFlashAttention",
        "aclnnSparseFlashAttentionGrad",
        "aclnnSparseLightningIndexerGradKLLoss",
    }
    assert min(functions.values()) >= steps

    options = {
        "checkpoint": tmp_path / "cpu" / "checkpoint.pt", "dtype": "bfloat16",
        "sequences": 3, "prompt": 60, "new": 6, "contexts": 48,
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
    assert attention_functions(calls)["aclnnScatterPaKvCache"] > 0


@once
@nightly
def test_int8_prefill(
    tmp_path: Path, run_example: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for device in ("cpu", "npu"):
        options = {
            "steps": 3, "sequence-length": 96, "windows": 2, "dtype": "bfloat16",
            "out": tmp_path / device,
        }  # fmt: skip
        run_example("int8_prefill", {**options, "device": device})
        tables.append((tmp_path / device / "errors.md").read_text())
    assert tables[0] == tables[1]
    assert "| 1 | int8 |" in tables[0]


@once
@nightly
def test_training_with_transformers(tmp_path: Path, run_example: Callable[..., None]) -> None:
    """By its Trainer, which takes the NPU if there is one."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    metrics = []
    for device in ("cpu", "npu"):
        options = {**TRANSFORMERS, "device": device, "out": tmp_path / device}
        with cann_simulator.recorded_calls() as calls:
            run_example("train_transformers", options)
        assert (attention_functions(calls)["aclnnSparseFlashAttention"] > 0) == (device == "npu")
        metrics.append(json.loads((tmp_path / device / "metrics.json").read_text()))
        del metrics[-1]["seconds"]
    assert metrics[0] == metrics[1]


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


@once
@pytest.mark.parametrize("new", [1, 40])
def test_dense_attention_over_two_ranks(monkeypatch: pytest.MonkeyPatch, new: int) -> None:
    """The parts that ranks merge, within the NPU's limits, of which one has no key of a prompt."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("context_parallel_decode")
    found = []
    for device in ("cpu", "npu"):
        model = example.Model(0, device)
        key, value = (model.project(2, 40, *shape) for shape in example.Dense.shapes)
        query = model.project(2, new, example.HEADS, example.HEAD_SIZE)
        lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
        behind = lengths[:, None] - torch.arange(40, device=device).flip(0) - 1
        positions = torch.where(behind < 0, -1, behind)
        parts = []
        with cann_simulator.recorded_calls() as calls:
            for rank in range(2):
                part = example.Part(rank, 2)
                cache = example.Cache.empty(part, 2, 40, example.Dense.shapes, key)
                cache.write(key, value, positions)
                parts.append(example.attend_to_all(cache, query, positions[:, -new:], lengths))
            out, lse = ascend_attn_ops.attention_update(
                [lse for _, lse in parts], [x for x, _ in parts]
            )
        found.append((out.cpu(), lse.cpu()))
    functions = attention_functions(calls)
    assert functions["aclnnFusedInferAttentionScoreV4"] == 2
    assert functions["aclnnAttentionUpdate"] == 1
    for on_cpu, on_npu in zip(*found, strict=True):
        assert torch.equal(on_cpu, on_npu)


@once
@nightly
def test_training_over_two_ranks_is_that_with_gloo(tmp_path: Path) -> None:
    histories = {}
    for device in ("cpu", "npu"):
        options = {**OPTIONS, "device": device, "out": tmp_path / device, "context-parallel": 2}
        arguments = [str(EXAMPLES / "train_lightning_indexer.py")]
        arguments += [f"--{name}={value}" for name, value in options.items()]
        if device == "npu":
            code = f"import runpy, sys\nsys.argv = {arguments}\n"
            code += 'runpy.run_path(sys.argv[0], run_name="__main__")'
            for ended in on_ranks(2, code):
                assert ended.status == 0, ended.err
        else:
            # torch would take the device of torch_npu for that of a mesh.
            without = {"LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node=2", *arguments]
            environment = {**os.environ, **without, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, timeout=240, check=True)
        histories[device] = json.loads((tmp_path / device / "metrics.json").read_text())["history"]
    assert histories["npu"] == histories["cpu"]
