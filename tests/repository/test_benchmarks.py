"""The path of the benchmarks' figures: the file, the tables of the docs, the comparison."""

from __future__ import annotations

import json
import subprocess
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
    with pytest.raises(SystemExit, match=r"no results of benchmarks/sparse_decode\.py"):
        results.cases("sparse_decode")


def compare(old: Path, new: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), str(old), str(new)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_slower_is_named(tmp_path: Path) -> None:
    old, same, slower = (tmp_path / f"{name}.json" for name in ("old", "same", "slower"))
    record(old)
    # Our figure is within the bound; torch's exceeds it, but only ours are checked.
    record(same, ours=0.109, theirs=0.5)
    record(slower, ours=0.112)
    passed = compare(old, same)
    assert passed.returncode == 0, passed.stderr
    assert passed.stdout == (
        "0 of 3 slower by more than 10%; on average ours takes 1.03 times as long, everything else "
        "2.00 times\n"
    )
    failed = compare(old, slower)
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[0] == (
        "1.12 times as long: sparse_flash_attention, sparse_flash_attention S=8, ours, "
        "100 to 112 ms"
    )
    assert compare(slower, old).returncode == 0


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    old, other, empty = (tmp_path / f"{name}.json" for name in ("old", "other", "empty"))
    record(old)
    (content,) = json.loads(old.read_text())
    another = content | {"machine": {"cpu": "another", "threads": 2}}
    other.write_text(json.dumps([another]))
    empty.write_text(json.dumps([content | {"rows": []}]))
    for new, message in ((other, "no machine in common: "), (empty, "nothing of ours in common")):
        failed = compare(old, new)
        assert failed.returncode == 1
        assert message in failed.stderr
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps([another, content | {"rows": content["rows"][:2]}]))
    assert compare(old, partial).stdout.count("not measured again: ") == 2


def test_tables_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    from results import load
    from write_tables import with_tables

    path = tmp_path / "results.json"
    record(path)
    page = "before\n<!-- bench: readme -->\nold\n<!-- bench end -->\nafter\n"
    table = "\n".join(
        [
            "| | ours, ms | share of the matmul peak | torch takes, all pairs and a mask | torch "
            "takes, gathering the keys |",
            "|---|---:|---:|---:|---:|",
            "| `sparse_flash_attention` | 100 | 50% | \N{EN DASH} | 2.5x |",
        ]
    )
    written = with_tables(page, load(path))
    assert written == page.replace("old", table)
    assert with_tables(written, load(path)) == written
    with pytest.raises(ValueError, match="a table without an end"):
        with_tables("<!-- bench: readme -->\n", load(path))


def test_the_table_of_processors(tmp_path: Path) -> None:
    from results import Results, load
    from write_tables import with_tables

    path = tmp_path / "results.json"
    record(path)
    (here,) = load(path)
    here.about["machine"]["cpu"] = "One (AVX2, AVX512F, AVX512_BF16)"
    rows = {key: row | {"seconds": row["seconds"] / 2} for key, row in list(here.rows.items())[:3]}
    other = Results({"machine": {"cpu": "Another"}}, rows)
    page = with_tables("<!-- bench: processors -->\n<!-- bench end -->", [here, other])
    assert page.splitlines()[1:-1] == [
        "| | sizes | One, AVX512_BF16: ms | share of its matmul peak | Another: ms | share of its "
        "matmul peak |",
        "|---|---|---:|---:|---:|---:|",
        "| `sparse_flash_attention` | S=8 | 100 | 50% | 50.0 | 50% |",
        "| `sparse_flash_attention_grad` | S=8 | 200 | 50% | 100 | 50% |",
    ]


def test_a_table_shows_the_first_processor_that_has_measured_it(tmp_path: Path) -> None:
    from results import Results, load
    from tables import NOT_MEASURED, serving
    from write_tables import with_tables

    path = tmp_path / "results.json"
    record(path)
    (here,) = load(path)
    rows = {
        ("fused_infer_attention_score", "B=1, 1 over 8, rows", name): {"seconds": 0.002}
        for name in ("ours", "reading", "products")
    }
    other = Results({"machine": {"cpu": "Another"}}, rows)
    empty = "<!-- bench: serving -->\n<!-- bench end -->"
    shown = [with_tables(empty, machines) for machines in ([here], [here, other], [other, here])]
    tables = [page.split("-->\n", 1)[1].rsplit("\n", 1)[0] for page in shown]
    assert tables[0] == NOT_MEASURED
    assert tables[1] == f"Measured on Another:\n\n{serving(other)}"
    assert tables[2] == serving(other)


def test_the_table_of_compressed_keys(tmp_path: Path) -> None:
    from results import Recorder, load
    from sparse_flash_mla import Shape
    from tables import NOT_MEASURED, compressed_decode, compressed_keys, compressed_memory

    path = tmp_path / "results.json"
    record(path)
    tables = compressed_keys, compressed_decode, compressed_memory
    assert {table(load(path)[0]) for table in tables} == {NOT_MEASURED}
    recorder = Recorder("sparse_flash_mla", path)
    figures = {"seconds": 0.2, "gflops": 40.0, "peak_gflops": 80.0}
    for operator in ("sparse_flash_mla_grad", "sparse_flash_mla"):
        recorder.add(f"{operator} {Shape('CSA', 1024)}", "ours", **figures)
    recorder.add(f"sparse_flash_mla {Shape('CSA', 1024)}", "torch, masking", seconds=0.5)
    for name, seconds in (("ours", 0.003), ("reading", 0.001), ("products", 0.002)):
        recorder.add("decode CSA B=8 S=16384 N1=64", name, seconds=seconds)
    assert compressed_keys(load(path)[0]).splitlines()[2:] == [
        "| `sparse_flash_mla` | CSA | S=1024 N1=64 bfloat16 | 200 | 50% | 2.5x |",
        "| `sparse_flash_mla_grad` | CSA | S=1024 N1=64 bfloat16 | 200 | 50% | \N{EN DASH} |",
    ]
    case = f"sparse_flash_mla {Shape('CSA', 1024)}"
    recorder.add(case, "ours", bytes=2.5e6, bytes_needed=1e6)
    assert compressed_memory(load(path)[0]).splitlines()[2:] == [
        "| `sparse_flash_mla` | CSA S=1024 N1=64 bfloat16 | 2.50 | 1.00 |"
    ]
    assert compressed_decode(load(path)[0]).splitlines()[2:] == [
        "| CSA | B=8 S=16384 N1=64 | 3.00 | 1.00 | 2.00 |"
    ]


def test_the_table_of_serving(tmp_path: Path) -> None:
    from fused_infer_attention_score import CASES
    from results import Recorder, load
    from tables import NOT_MEASURED, serving

    path = tmp_path / "results.json"
    record(path)
    assert serving(load(path)[0]) == NOT_MEASURED
    recorder = Recorder("fused_infer_attention_score", path)
    for case in CASES:
        for name in ("ours", "reading", "products"):
            recorder.add(str(case), name, seconds=0.002)
    recorder.add(str(CASES[0]), "torch SDPA", seconds=0.003)
    first, *others = serving(load(path)[0]).splitlines()[2:]
    assert first == (
        "| B=1 N=16/16 D=128 | 1 over 4096 | pages of rows | 2.00 | 1.5x | 2.00 | 2.00 |"
    )
    assert len(others) == len(CASES) - 1
    assert "| B=4 N=128/1 D=512+64 | 1 over 4096 | pages of rows |" in "\n".join(others)


def test_the_table_of_threads(tmp_path: Path) -> None:
    from results import Recorder, load
    from tables import threads

    path = tmp_path / "results.json"
    for count, seconds in ((1, 0.3), (2, 0.16), (3, 0.1)):
        for name in ("f, decoding", "torch, matmul"):
            Recorder("threads", path).add(name, str(count), seconds=seconds, threads=count)
    (results,) = load(path)
    assert threads(results).splitlines() == [
        "| | 1 thread, ms | with 2 threads | with 3 threads |",
        "|---|---:|---:|---:|",
        "| `f`, decoding | 300 | 1.88x | 3.00x |",
        "| torch, matmul | 300 | 1.88x | 3.00x |",
    ]


def test_the_docs_are_those_of_the_committed_results() -> None:
    """Nobody has edited a table by hand, and every table has a place."""
    from processors import COMPARED
    from results import load
    from tables import TABLES
    from write_tables import PLACE, RESULTS, pages, with_tables

    machines = load(RESULTS)
    used = set()
    for path, page in pages().items():
        assert with_tables(page, machines) == page, f"{path}: python benchmarks/write_tables.py"
        used |= {name for _, name, _ in PLACE.findall(page)}
    assert used == {*TABLES, *COMPARED}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1024, 0.5), (4096, 2.0)], 2048),
        ([(512, 0.25), (1024, 0.5), (4096, 2.0)], 2048),
        # Faster from the first length on, and never.
        ([(1024, 1.5), (4096, 2.0)], 1024),
        ([(1024, 1.5), (4096, 0.9)], None),
    ],
)
def test_where_one_becomes_faster(
    points: list[tuple[float, float]], expected: float | None
) -> None:
    from tables import crossing

    assert crossing(points) == (expected and pytest.approx(expected))


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
