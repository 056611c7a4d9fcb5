"""examples/int8_prefill.py, at a size that takes seconds."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.checkout import EXAMPLES

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("matplotlib") is None, reason="the example draws with matplotlib"
    ),
    pytest.mark.usefixtures("no_limits"),
]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_unfolded_attention_is_the_model_s_own() -> None:
    import int8_prefill
    from sparse_lm import ModelConfig, SparseLM, select_all

    torch.manual_seed(0)
    model = SparseLM(ModelConfig(hidden_size=64, heads=4, latent_dim=64, head_dim=32, rope_dim=16))
    text = torch.randint(256, (2, 65))
    with torch.no_grad():
        bits, captured = int8_prefill.run(model, text, int8_prefill.attend_float64)
        nats, _ = model(text, select_all)
    # bfloat16 query, key and value here, float32 there.
    assert float(bits) == pytest.approx(float(nats) / math.log(2), rel=1e-3)
    assert [tuple(x.shape) for x in captured[1][:3]] == [(2, 4, 64, 48)] * 3
    assert not bool(captured[1].value[..., 32:].any())


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import int8_prefill
    from sparse_lm import ModelConfig, SparseLM

    config = ModelConfig(hidden_size=64, heads=2, latent_dim=64, index_heads=2, index_dim=32)
    checkpoint = {"recipe": asdict(config), "model": SparseLM(config).state_dict()}
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    sizes = ["--sequence-length=40", "--windows=1", "--dtype=float32", f"--out={tmp_path}"]
    for source in (f"--checkpoint={tmp_path / 'checkpoint.pt'}", "--steps=2"):
        monkeypatch.setattr(sys, "argv", ["int8_prefill.py", source, *sizes])
        int8_prefill.main()
        lines = (tmp_path / "errors.md").read_text().splitlines()
        assert [line.split(" | ")[1] for line in lines[2:6]] == ["bfloat16", "int8"] * 2
        assert (tmp_path / "errors.png").stat().st_size > 10_000
