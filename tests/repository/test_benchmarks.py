"""The path of the benchmarks' figures: the file, the tables of the docs, the comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.checkout import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def record(path: Path, **seconds: float) -> None:
    """Write a run with one row of ours, one of torch's and one of another operator."""
    from results import Recorder

    recorder = Recorder("sparse_flash_attention", path, threads=2)
    figures = {"seconds": 0.2, "gflops": 40.0, "peak_gflops": 80.0}
    case = "sparse_flash_attention S=8"
    recorder.add(case, "ours", **figures | {"seconds": seconds.get("ours", 0.1)})
    recorder.add(case, "torch, gathering", **figures | {"seconds": seconds.get("theirs", 0.25)})
    recorder.add("sparse_flash_attention_grad S=8", "ours", **figures)
    Recorder("lightning_indexer", path, threads=1).add("lightning_indexer S=8", "ours", **figures)


def test_a_row_that_is_measured_again_replaces_the_first(tmp_path: Path) -> None:
    from results import load

    path = tmp_path / "folder" / "results.json"
    record(path)
    record(path, ours=0.123456789)
    (results,) = load(path)
    assert results.about["machine"]["threads"] == 2
    version = results.about["versions"]["torch"]
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]
    row = results.cases("sparse_flash_attention")["sparse_flash_attention S=8"]["ours"]
    assert row == {"seconds": 0.12346, "gflops": 40, "peak_gflops": 80}
    # A row a line.
    assert len(results.rows) == 4 == path.read_text().count('\n{"benchmark": ')


def test_what_is_slower_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import compare

    old, same, slower, other = (tmp_path / f"{name}.json" for name in ("old", "a", "b", "c"))

    def status(first: Path, second: Path) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["compare.py", str(first), str(second)])
        with pytest.raises(SystemExit) as stopped:
            compare.main()
        return stopped.value.code

    record(old)
    # Our figure is within the bound; torch's exceeds it, but only ours are checked.
    record(same, ours=0.109, theirs=0.5)
    record(slower, ours=0.112)
    assert status(old, same) == status(slower, old) == 0
    assert capsys.readouterr().out.startswith(
        "0 of 3 slower by more than 10%; on average ours takes 1.03 times as long, everything else "
        "2.00 times\n"
    )
    assert status(old, slower) == 1
    assert capsys.readouterr().out.startswith(
        "1.12 times as long: sparse_flash_attention, sparse_flash_attention S=8, ours, "
        "100 to 112 ms\n"
    )
    first, *_ = json.loads(old.read_text())
    other.write_text(json.dumps([first | {"machine": {"cpu": "another"}}]))
    assert "no machine in common: " in str(status(old, other))
    other.write_text(json.dumps([first | {"rows": []}]))
    assert "nothing of ours in common" in str(status(old, other))
    other.write_text(json.dumps([first | {"rows": first["rows"][:1]}]))
    assert status(old, other) == 0
    assert capsys.readouterr().out.count("not measured again: ") == 2


def test_tables_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    """Figures that the first processor lacks come from another one, or are said to be missing."""
    from results import Results, load
    from tables import NOT_MEASURED
    from write_tables import text_of, with_tables

    path = tmp_path / "results.json"
    record(path)
    (here,) = load(path)
    page = "before\n<!-- bench: {} -->\nold\n<!-- bench end -->\nafter\n"
    written = with_tables(page.format("sparse"), [here])
    assert written == page.format("sparse").replace("old", text_of("sparse", [here]))
    assert with_tables(written, [here]) == written
    assert "| `sparse_flash_attention` | 100 | 50% | \N{EN DASH} | 2.5x |" in written
    keys = (
        ("fused_infer_attention_score", "B=1, 1 over 8, rows", name)
        for name in ("ours", "reading", "products")
    )
    other = Results({"machine": {"cpu": "Another"}}, {key: {"seconds": 0.002} for key in keys})
    for machines, shown in (
        ([here], NOT_MEASURED),
        ([here, other], f"Measured on Another:\n\n{text_of('serving', [other])}"),
        ([other, here], text_of("serving", [other])),
    ):
        written = with_tables(page.format("serving"), machines)
        assert written == page.format("serving").replace("old", shown)
    with pytest.raises(ValueError, match="a table without an end"):
        with_tables("<!-- bench: sparse -->\n", [here])


def test_the_docs_are_those_of_the_committed_results() -> None:
    """Nobody has edited a table by hand, and every table has a place."""
    from results import load
    from tables import TABLES
    from write_tables import PLACE, RESULTS, pages, with_tables

    machines = load(RESULTS)
    used = set()
    for path, page in pages().items():
        assert with_tables(page, machines) == page, f"{path}: python benchmarks/write_tables.py"
        used |= {name for _, name, _ in PLACE.findall(page)}
    assert used == {*TABLES}


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("selected", [8, 32])
def test_the_training_steps_that_are_compared_compute_the_same(selected: int) -> None:
    """In float32: the eager layer is the sparse one, and with all keys selected the dense one."""
    from sparse_lm import ModelConfig
    from training_step import model_of

    config = ModelConfig(
        layers=1, hidden_size=32, heads=2, head_dim=16, latent_dim=32, rope_dim=8, index_heads=16,
        index_dim=16, top_k=selected,
    )  # fmt: skip
    text = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    found = {}
    for way in ("sparse", "eager", "dense"):
        model, select = model_of(way, config)
        losses = model(text, select)
        sum(losses).backward()
        found[way] = (losses, {name: x.grad for name, x in model.named_parameters()})
    torch.testing.assert_close(found["eager"], found["sparse"], rtol=1e-4, atol=1e-6)
    if selected == 32:
        torch.testing.assert_close(found["dense"], found["sparse"], rtol=1e-4, atol=1e-6)
    else:
        assert abs(found["dense"][0][1] - found["sparse"][0][1]) > 1e-3
