"""The example of DeepSeek-V4, run as a user runs it, at a size that takes seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import example_runs
from support.checkout import EXAMPLES
from support.example_runs import kill_at, metrics, run, torchrun
from support.turns import nightly

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("matplotlib", reason="the example draws with matplotlib")

SCRIPT = EXAMPLES / "train_deepseek_v4.py"
OPTIONS = {
    "steps": 12, "sequence-length": 96, "hidden-size": 32, "heads": 2, "head-dim": 16, "window": 8,
    "hca-ratio": 8, "index-heads": 4, "index-dim": 16, "top-k": 4, "eval-windows": 2,
    "checkpoint-every": 2, "log-every": 1, "dtype": "float32",
}  # fmt: skip


def command(out: Path) -> list[str]:
    return example_runs.command(SCRIPT, {**OPTIONS, "out": out})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    printed = run(*command(out))
    assert "step 12/12  train" in printed
    assert "compressed keys of held-out text" in printed
    return out


def test_it_learns_and_draws(whole: Path) -> None:
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    found = metrics(whole)
    curve = found["history"]["bits_per_byte"]
    assert len(curve) == len(found["history"]["indexer_loss"]) == 12
    assert curve[-1] < curve[0]
    for shares in found["captured_mass"].values():
        assert 0 < shares["indexer"] < shares["ideal"] < 1


@nightly
def test_a_killed_run_resumes(whole: Path, tmp_path: Path) -> None:
    kill_at("step 7/12", *command(tmp_path))
    assert "resumed at step" in run(*command(tmp_path), "--resume")
    assert metrics(tmp_path) == metrics(whole)


@nightly
def test_two_ranks_share_the_batch_of_a_resumed_run(whole: Path, tmp_path: Path) -> None:
    """In float32: bfloat16 rounds the gradients of two halves to others than those of the whole."""
    shared = command(tmp_path)
    kill_at("step 5/12", *shared)
    printed = run(*torchrun(2, *shared, "--resume"))
    begin = int(re.findall(r"resumed at step (\d+)", printed)[0])
    assert begin >= 4
    one, two = (metrics(out)["history"] for out in (whole, tmp_path))
    for name in ("bits_per_byte", "indexer_loss"):
        assert two[name][:begin] == one[name][:begin]
        assert two[name] == pytest.approx(one[name], rel=1e-4)
