"""The example of transformers.Trainer, run as a user runs it, at a size that takes seconds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support import example_runs
from support.checkout import EXAMPLES
from support.example_runs import kill_at, metrics, run
from support.turns import nightly

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytest.importorskip("matplotlib", reason="the example draws with matplotlib")

SCRIPT = EXAMPLES / "train_transformers.py"
OPTIONS = {
    "layers": 2, "hidden-size": 32, "heads": 2, "head-dim": 16, "latent-dim": 32, "rope-dim": 16,
    "index-heads": 4, "index-dim": 32, "top-k": 12, "sequence-length": 48, "eval-windows": 2,
    "pretrain-steps": 12, "warmup-steps": 6, "sparse-steps": 6, "checkpoint-every": 2,
    "log-every": 1,
}  # fmt: skip


def command(out: Path) -> list[str]:
    return example_runs.command(SCRIPT, {**OPTIONS, "out": out})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    printed = run(*command(out))
    assert "step 12/12  pretrain" in printed
    assert "step 6/6  dense" in printed
    assert "lightning indexer" in printed
    return out


def test_phases_table_and_picture(whole: Path) -> None:
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")

    found = metrics(whole)
    assert [len(curve) for curve in found["history"].values()] == [12, 12]
    assert all(math.isfinite(x) for curve in found["history"].values() for x in curve)
    assert found["pretraining"][-1] < found["pretraining"][0]
    mass = found["held_out"]["attention_mass"]
    assert mass["dense"] == pytest.approx(1, abs=1e-3)
    # The indexer has learnt this. Its losses show less: each depends on its batch.
    assert mass["random"] < mass["indexer"] < mass["ideal"] < 1


@nightly
def test_a_killed_run_resumes(whole: Path, tmp_path: Path) -> None:
    kill_at("step 5/6  sparse", *command(tmp_path))
    printed = run(*command(tmp_path), "--resume")
    assert "sparse: resumed from" in printed
    assert "pretrain" not in printed
    assert metrics(tmp_path) == metrics(whole)
