"""The example that decodes with a paged cache, run as a user runs it, with an untrained model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.checkout import EXAMPLES

SIZES = {
    "layers": 2, "hidden_size": 32, "heads": 2, "head_dim": 16, "latent_dim": 32, "rope_dim": 8,
    "index_heads": 2, "index_dim": 16, "top_k": 8,
}  # fmt: skip


def decode(checkpoint: Path, **options: int | str) -> subprocess.CompletedProcess[str]:
    sizes = {"sequences": 5, "prompt": 40, "new": 12, "blocks": 17, "block-size": 4, "contexts": 48}
    options = sizes | options
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return subprocess.run(
        [sys.executable, EXAMPLES / "paged_decode.py", f"--checkpoint={checkpoint}", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.append(str(EXAMPLES))
    from sparse_lm import ModelConfig, SparseLM

    torch.manual_seed(0)
    config = ModelConfig(**SIZES)
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt"
    torch.save({"recipe": asdict(config), "model": SparseLM(config).state_dict()}, path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {}, {"blocks": 100}, {"block-size": 1, "blocks": 64}, {"block-size": 128, "blocks": 1},
        {"attention": "dense"},
    ],
    ids=["sequences wait for blocks", "all run at once", "blocks of one", "one at a time", "dense"],
)  # fmt: skip
def test_decodes_what_it_would_without_a_cache(
    checkpoint: Path, options: dict[str, int | str]
) -> None:
    result = decode(checkpoint, **options)
    assert result.returncode == 0, result.stderr
    assert "5 of 5 sequences equal decoding without a cache" in result.stdout
    assert re.search(r"\n +48 +[\d,]+ tokens/s +[\d,]+ tokens/s\n", result.stdout)


def test_says_what_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    assert "train_lightning_indexer.py first" in decode(tmp_path / "none.pt").stderr
    assert "--blocks: too few" in decode(checkpoint, blocks=2).stderr
