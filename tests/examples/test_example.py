"""The example, run as a user runs it, at a size that takes seconds."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import example_runs
from support.checkout import EXAMPLES
from support.example_runs import kill_at, metrics, run, start, torchrun
from support.processes import skip_unless_gloo_averages
from support.turns import nightly

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the example draws with matplotlib"
)

SCRIPT = EXAMPLES / "train_lightning_indexer.py"
STEPS = 40
OPTIONS = {
    "hidden-size": 64, "heads": 4, "head-dim": 32, "latent-dim": 64, "rope-dim": 16,
    "index-heads": 4, "index-dim": 32, "top-k": 16, "sequence-length": 96, "eval-windows": 4,
    "warmup-steps": STEPS // 2, "sparse-steps": STEPS // 2, "checkpoint-every": 7, "log-every": 1,
    "dtype": "float32",
}  # fmt: skip


def command(out: Path, **changes: object) -> list[str]:
    return example_runs.command(SCRIPT, {**OPTIONS, "out": out, **changes})


def load(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics without the timings, and the checkpoint."""
    return metrics(out), torch.load(out / "checkpoint.pt", weights_only=True)


def assert_same(first: Path, second: Path) -> None:
    (found, state), (other_found, other_state) = load(first), load(second)
    assert found == other_found
    torch.testing.assert_close(
        (state["model"], state["optimizer"]["state"]),
        (other_state["model"], other_state["optimizer"]["state"]),
        rtol=0,
        atol=0,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("finished")
    return out, run(*command(out))


def test_it_learns_and_draws(finished: tuple[Path, str]) -> None:
    out, printed = finished
    assert all(x in printed for x in ("; float32; ", "lightning indexer", f"step {STEPS}/{STEPS}"))
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    history = metrics(out)["history"]
    assert [len(curve) for curve in history.values()] == [STEPS, STEPS]
    assert all(math.isfinite(value) for curve in history.values() for value in curve)
    bits = history["bits_per_byte"]
    assert sum(bits[-5:]) < 0.8 * sum(bits[:5])


def test_metrics_compare_the_selections(finished: tuple[Path, str]) -> None:
    found = metrics(finished[0])
    assert found["top_k"] == OPTIONS["top-k"]
    mass, bits = found["held_out"]["attention_mass"], found["held_out"]["bits_per_byte"]
    assert set(mass) == set(bits) == {"dense", "ideal", "indexer", "recent", "random"}
    assert mass["dense"] == pytest.approx(1, abs=1e-5)
    assert 0 < mass["random"] < mass["indexer"] < mass["ideal"] < 1
    assert all(0 < value < 8 for value in bits.values())


def test_killed_run_resumes_as_if_nothing_happened(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    kill_at("step 10/", *command(tmp_path))
    assert not (tmp_path / "metrics.json").exists()
    printed = run(*command(tmp_path), "--resume")
    resumed = re.search(r"resumed at step (\d+)", printed)
    assert resumed is not None
    assert 7 <= int(resumed[1]) < STEPS
    assert_same(finished[0], tmp_path)


def test_checkpoint_of_another_recipe_is_refused(finished: tuple[Path, str]) -> None:
    result = start(*command(finished[0], **{"learning-rate": 0.5}), "--resume")
    assert result.status != 0
    assert "--learning-rate 0.0015, not 0.5" in result.err


@pytest.mark.parametrize("slow", ["bfloat16", "float32"])
def test_the_faster_dtype_is_chosen(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        time.sleep(1e-3 * (x.dtype == getattr(torch, slow)))

    monkeypatch.syspath_prepend(EXAMPLES)
    precision = importlib.import_module("precision")
    monkeypatch.setattr(precision.F, "linear", linear)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    chosen = precision.dtype_of("cpu", 8, 8)
    assert {chosen, slow} == {"bfloat16", "float32"}
    assert precision.dtype_of("npu", 8, 8) == "bfloat16"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert precision.dtype_of("cpu", 8, 8) == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_resumed_run_has_the_dtype_of_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    precision, training = map(importlib.import_module, ("precision", "training"))
    assert training.saved_recipe(tmp_path) == {}
    training.save({"recipe": {"dtype": dtype}}, tmp_path / "checkpoint.pt")
    assert training.saved_recipe(tmp_path) == {"dtype": dtype}
    ranks = tmp_path / "checkpoint-0000007"
    ranks.mkdir()
    (ranks / "about.json").write_text('{"recipe": {"dtype": "float32", "seed": 1}}')
    assert training.saved_recipe(tmp_path) == {"dtype": "float32", "seed": 1}
    sizes = {"batch_size": 1, "sequence_length": 8, "hidden_size": 8}
    options = argparse.Namespace(dtype=None, device="cpu", device_shapes=False, **sizes)
    assert precision.choose_dtype(options, dtype) == dtype


@nightly
def test_ranks_have_the_losses_of_one_process_also_when_resumed(tmp_path: Path) -> None:
    """On two ranks, and then on four."""
    skip_unless_gloo_averages()
    alone, together = tmp_path / "alone", tmp_path / "together"
    changes = {"warmup-steps": 6, "sparse-steps": 6, "checkpoint-every": 4, "dtype": "bfloat16"}
    assert "; bfloat16; " in run(*command(alone, **changes))
    assert metrics(alone)["dtype"] == "bfloat16"
    parallel = command(together, **changes, **{"context-parallel": 2})
    kill_at("step 5/", *torchrun(2, *parallel), ranks=True)
    assert not (together / "metrics.json").exists()
    printed = run(*torchrun(4, *parallel, "--data-parallel", "--resume"))
    assert re.search(r"resumed at step [48]\b", printed)
    expected, actual = (metrics(x)["history"] for x in (alone, together))
    for name, curve in expected.items():
        # Until parameters change, nothing but the sum over the ranks differs.
        assert actual[name][0] == pytest.approx(curve[0], rel=1e-5)
        # Then the gradients of the weights, which autocast rounds to bfloat16 on every rank.
        assert actual[name] == pytest.approx(curve, rel=0.02), name
    assert metrics(together)["held_out"]


@nightly
def test_number_of_ranks_is_checked(tmp_path: Path) -> None:
    result = start(*command(tmp_path, **{"context-parallel": 3}))
    assert result.status != 0
    assert "--context-parallel 3 and --data-parallel 1 take 3 ranks: torchrun" in result.err
