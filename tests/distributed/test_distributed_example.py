"""examples/train_lightning_indexer.py under torchrun, and resumed on another number of ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkout import EXAMPLES
from support.processes import skip_unless_gloo_averages
from support.turns import nightly

pytestmark = [
    nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("matplotlib") is None, reason="the example draws with matplotlib"
    ),
]

SCRIPT = EXAMPLES / "train_lightning_indexer.py"
STEPS = 12
OPTIONS = {
    "hidden-size": 64, "heads": 4, "head-dim": 32, "latent-dim": 64, "rope-dim": 16,
    "index-heads": 4, "index-dim": 32, "top-k": 16, "sequence-length": 96, "eval-windows": 2,
    "warmup-steps": STEPS // 2, "sparse-steps": STEPS // 2, "checkpoint-every": 4, "log-every": 1,
    "dtype": "bfloat16",
}  # fmt: skip
SECONDS = 240


def command(ranks: int, out: Path, *more: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    return [
        sys.executable, "-u", *(launcher if ranks else []), str(SCRIPT), *options, f"--out={out}",
        *more,
    ]  # fmt: skip


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, text=True,
        # A rank that crashes says where.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(arguments: list[str]) -> str:
    with start(arguments) as process:
        try:
            printed, _ = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                for pid in (*children(process.pid), process.pid):
                    os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return printed


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def history(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())["history"]


def test_losses_are_those_of_one_process_also_when_resumed(tmp_path: Path) -> None:
    skip_unless_gloo_averages()
    alone, together = tmp_path / "alone", tmp_path / "together"
    run(command(0, alone))
    with start(command(2, together, "--context-parallel=2")) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5/"):
                for worker in children(process.pid):
                    os.kill(worker, signal.SIGKILL)
    assert not (together / "metrics.json").exists()
    resume = command(4, together, "--context-parallel=2", "--data-parallel", "--resume")
    assert re.search(r"resumed at step [48]\b", run(resume))
    expected, actual = history(alone), history(together)
    for name, curve in expected.items():
        # Until parameters change, nothing but the sum over the ranks differs.
        assert actual[name][0] == pytest.approx(curve[0], rel=1e-5)
        # Then the gradients of the weights, which autocast rounds to bfloat16 on every rank.
        assert actual[name] == pytest.approx(curve, rel=0.02), name
    assert json.loads((together / "metrics.json").read_text())["held_out"]


def test_number_of_ranks_is_checked(tmp_path: Path) -> None:
    with start(command(0, tmp_path, "--context-parallel=3")) as process:
        printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "--context-parallel 3 and --data-parallel 1 take 3 ranks: torchrun" in printed
