"""The example that serves with continuous batching, run as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.checkout import EXAMPLES
from support.example_runs import run, start
from support.turns import nightly

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = EXAMPLES / "serve_with_pages.py"
SMALL = ["--requests=5", "--prompt=40", "--new=10", "--block-size=16", "--blocks=9", "--budget=12"]


@pytest.mark.parametrize("draws", [False, pytest.param(True, marks=nightly)])
def test_serves(draws: bool, tmp_path: Path) -> None:
    picture = tmp_path / "speed.png"
    printed = run(str(SCRIPT), *SMALL, "--batch=3", *([f"--plot={picture}"] if draws else []))
    assert "5 of 5 requests have the tokens of generate()" in printed
    assert "0 running,  9 blocks free" in printed
    if not draws:
        return
    assert len(re.findall(r"\n +\d+ at a time +[\d,]+ tokens/s", printed)) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_says_what_is_missing() -> None:
    assert "--blocks: too few" in start(str(SCRIPT), *SMALL, "--blocks=2").err
    assert "--budget: expected" in start(str(SCRIPT), "--budget=2").err
