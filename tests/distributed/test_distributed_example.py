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
from support import example_runs
from support.checkout import EXAMPLES
from support.example_runs import ENVIRONMENT, run, start, torchrun
from support.processes import skip_unless_gloo_averages
from support.turns import nightly

pytestmark = [
    nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("matplotlib") is None, reason="the example draws with matplotlib"
    ),
]

STEPS = 12
OPTIONS = {
    "hidden-size": 64, "heads": 4, "head-dim": 32, "latent-dim": 64, "rope-dim": 16,
    "index-heads": 4, "index-dim": 32, "top-k": 16, "sequence-length": 96, "eval-windows": 2,
    "warmup-steps": STEPS // 2, "sparse-steps": STEPS // 2, "checkpoint-every": 4, "log-every": 1,
    "dtype": "bfloat16",
}  # fmt: skip


def command(out: Path, *more: str) -> list[str]:
    script = EXAMPLES / "train_lightning_indexer.py"
    return [*example_runs.command(script, {**OPTIONS, "out": out}), *more]


def kill_ranks_at(line: str, *arguments: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", *arguments], text=True, env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for printed in process.stdout:
            if printed.startswith(line):
                for rank in children.read_text().split():
                    os.kill(int(rank), signal.SIGKILL)
    assert process.returncode != 0


def history(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())["history"]


def test_losses_are_those_of_one_process_also_when_resumed(tmp_path: Path) -> None:
    skip_unless_gloo_averages()
    alone, together = tmp_path / "alone", tmp_path / "together"
    run(*command(alone))
    parallel = command(together, "--context-parallel=2")
    kill_ranks_at("step 5/", *torchrun(2, *parallel))
    assert not (together / "metrics.json").exists()
    printed = run(*torchrun(4, *parallel, "--data-parallel", "--resume"))
    assert re.search(r"resumed at step [48]\b", printed)
    expected, actual = history(alone), history(together)
    for name, curve in expected.items():
        # Until parameters change, nothing but the sum over the ranks differs.
        assert actual[name][0] == pytest.approx(curve[0], rel=1e-5)
        # Then the gradients of the weights, which autocast rounds to bfloat16 on every rank.
        assert actual[name] == pytest.approx(curve, rel=0.02), name
    assert json.loads((together / "metrics.json").read_text())["held_out"]


def test_number_of_ranks_is_checked(tmp_path: Path) -> None:
    result = start(*command(tmp_path, "--context-parallel=3"))
    assert result.status != 0
    assert "--context-parallel 3 and --data-parallel 1 take 3 ranks: torchrun" in result.err
