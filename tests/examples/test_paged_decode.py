"""The example that decodes with a paged cache, run as a user runs it, with an untrained model."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support import fresh
from support.checkout import EXAMPLES
from support.example_runs import command, start
from support.turns import nightly

SIZES = {
    "layers": 2, "hidden_size": 32, "heads": 2, "head_dim": 16, "latent_dim": 32, "rope_dim": 8,
    "index_heads": 2, "index_dim": 16, "top_k": 8,
}  # fmt: skip


def decode(checkpoint: Path, **options: int | str) -> fresh.Ended:
    sizes = {"sequences": 5, "prompt": 40, "new": 12, "blocks": 17, "block-size": 4, "contexts": 48,
             "text": 16}  # fmt: skip
    script = EXAMPLES / "paged_decode.py"
    return start(*command(script, {"checkpoint": checkpoint, **sizes, **options}))


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
        pytest.param({}, id="sequences wait for blocks"),
        pytest.param({"blocks": 100}, id="all run at once", marks=nightly),
        pytest.param({"block-size": 1, "blocks": 64}, id="blocks of one", marks=nightly),
        pytest.param({"block-size": 128, "blocks": 1}, id="one at a time", marks=nightly),
        pytest.param({"attention": "dense"}, id="dense"),
    ],
)
def test_decodes_what_it_would_without_a_cache(
    checkpoint: Path, options: dict[str, int | str]
) -> None:
    result = decode(checkpoint, **options)
    assert result.status == 0, result.err
    assert "5 of 5 sequences equal decoding without a cache" in result.out
    assert re.search(r"\n +48 +[\d,]+ tokens/s +[\d,]+ tokens/s\n", result.out)
    assert re.search(r"\nint8 has +0\.65x +0\.56x +(1\.00|0\.99)\d\dx\n", result.out)


def test_says_what_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    assert "train_lightning_indexer.py first" in decode(tmp_path / "none.pt").err
    assert "--blocks: too few" in decode(checkpoint, blocks=2).err
