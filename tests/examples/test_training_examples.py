"""Training examples with transformers, run as a user runs them, at sizes that take seconds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from support import example_runs
from support.checkout import EXAMPLES
from support.example_runs import kill_at, metrics, run, torchrun
from support.turns import nightly

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("matplotlib", reason="the examples draw with matplotlib")

COMMON = {
    "hidden-size": 32, "heads": 2, "head-dim": 16, "index-heads": 4, "eval-windows": 2,
    "checkpoint-every": 2, "log-every": 1,
}  # fmt: skip
OPTIONS = {
    "train_deepseek_v4": {
        "steps": 12, "sequence-length": 96, "window": 8, "hca-ratio": 8, "index-dim": 16,
        "top-k": 4, "dtype": "float32",
    },
    "train_transformers": {
        "layers": 2, "latent-dim": 32, "rope-dim": 16, "index-dim": 32, "top-k": 12,
        "sequence-length": 48, "pretrain-steps": 12, "warmup-steps": 6, "sparse-steps": 6,
    },
}  # fmt: skip


def command(name: str, out: Path) -> list[str]:
    return example_runs.command(EXAMPLES / f"{name}.py", {**COMMON, **OPTIONS[name], "out": out})


def trained(name: str, factory: pytest.TempPathFactory, *expected: str) -> Path:
    out = factory.mktemp(name)
    printed = run(*command(name, out))
    assert all(x in printed for x in expected)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    return out


@pytest.fixture(scope="module")
def deepseek_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    expected = "step 12/12  train", "compressed keys of held-out text"
    return trained("train_deepseek_v4", tmp_path_factory, *expected)


@pytest.fixture(scope="module")
def with_trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    expected = "step 12/12  pretrain", "step 6/6  dense", "lightning indexer"
    return trained("train_transformers", tmp_path_factory, *expected)


def test_deepseek_v4_learns(deepseek_v4: Path) -> None:
    found = metrics(deepseek_v4)
    curve = found["history"]["bits_per_byte"]
    assert len(curve) == len(found["history"]["indexer_loss"]) == 12
    assert curve[-1] < curve[0]
    for shares in found["captured_mass"].values():
        assert 0 < shares["indexer"] < shares["ideal"] < 1


def test_trainer_phases(with_trainer: Path) -> None:
    found = metrics(with_trainer)
    assert [len(curve) for curve in found["history"].values()] == [12, 12]
    assert all(math.isfinite(x) for curve in found["history"].values() for x in curve)
    assert found["pretraining"][-1] < found["pretraining"][0]
    mass = found["held_out"]["attention_mass"]
    assert mass["dense"] == pytest.approx(1, abs=1e-3)
    # The indexer has learnt this. Its losses show less: each depends on its batch.
    assert mass["random"] < mass["indexer"] < mass["ideal"] < 1


@nightly
@pytest.mark.parametrize(
    ("name", "fixture", "line", "resumed"),
    [
        ("train_deepseek_v4", "deepseek_v4", "step 7/12", "resumed at step"),
        ("train_transformers", "with_trainer", "step 5/6  sparse", "sparse: resumed from"),
    ],
)
def test_a_killed_run_resumes(
    name: str, fixture: str, line: str, resumed: str, tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    whole = request.getfixturevalue(fixture)
    kill_at(line, *command(name, tmp_path))
    printed = run(*command(name, tmp_path), "--resume")
    assert resumed in printed
    assert "pretrain" not in printed
    assert metrics(tmp_path) == metrics(whole)


@nightly
def test_two_ranks_share_the_batch_of_a_resumed_run(deepseek_v4: Path, tmp_path: Path) -> None:
    """In float32: bfloat16 rounds the gradients of two halves to others than those of the whole."""
    shared = command("train_deepseek_v4", tmp_path)
    kill_at("step 5/12", *shared)
    printed = run(*torchrun(2, *shared, "--resume"))
    begin = int(re.findall(r"resumed at step (\d+)", printed)[0])
    assert begin >= 4
    one, two = (metrics(out)["history"] for out in (deepseek_v4, tmp_path))
    for name in ("bits_per_byte", "indexer_loss"):
        assert two[name][:begin] == one[name][:begin]
        assert two[name] == pytest.approx(one[name], rel=1e-4)
