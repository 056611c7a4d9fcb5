"""The example that serves with continuous batching, run as a user runs it and in parts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.checkout import EXAMPLES
from support.example_runs import run
from support.turns import nightly

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = EXAMPLES / "serve_with_pages.py"
SMALL = ["--requests=5", "--prompt=40", "--new=10", "--block-size=16", "--blocks=9", "--budget=12"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import serve_with_pages

    return serve_with_pages


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


@pytest.mark.usefixtures("no_limits")
@torch.no_grad()
def test_steps_mix_chunks_of_prompts_with_decoding(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model is called: steps of a chunk alone, of both, and of several that decode."""
    torch.manual_seed(1)
    model = example.make_model("cpu", torch.float32)
    requests = example.random_requests(4, 40, 12, every=2)
    expected = [example.generate(model, request) for request in requests]
    model.set_attn_implementation("pages")
    steps = []

    def seen(module: torch.nn.Module, arguments: object, options: dict[str, object]) -> None:
        pages = options["pages"]
        assert isinstance(pages, example.Pages)
        counts = torch.tensor([0, *pages.query_ends]).diff().tolist()
        steps.append(list(zip(counts, pages.key_lengths, strict=True)))

    model.register_forward_pre_hook(seen, with_kwargs=True)
    server = example.Server(model, blocks=8, block_size=16, budget=12, batch=4)
    server.serve(requests)
    assert [request.tokens for request in requests] == expected
    assert sorted(server.free) == list(range(8))
    assert steps[0] == [(12, 12)]
    assert max(sum(count for count, _ in step) for step in steps) == 12
    chunks = [[count > 1 for count, _ in step] for step in steps]
    assert [False, True] in chunks
    assert [False, False, False] in chunks
    # A chunk continues a prompt of which a part is cached.
    assert any(1 < count < keys for step in steps for count, keys in step)


def test_says_what_is_missing(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, "--blocks=2"])
    with pytest.raises(SystemExit, match="--blocks: too few"):
        example.main()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--budget=2"])
    with pytest.raises(SystemExit):
        example.main()
    assert "--budget: expected" in capsys.readouterr().err
