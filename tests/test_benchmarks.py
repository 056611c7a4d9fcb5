"""What the benchmarks' figures go through: the file, and what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


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
    from results import Results

    path = tmp_path / "folder" / "results.json"
    record(path)
    record(path, ours=0.123456789)
    results = Results.load(path)
    assert results.about["machine"]["threads"] == 2
    version = results.about["versions"]["torch"]
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]
    row = results.cases("sparse_flash_attention")["sparse_flash_attention S=8"]["ours"]
    assert row == {"seconds": 0.12346, "gflops": 40, "peak_gflops": 80}
    # A row a line.
    assert len(results.rows) == 4 == path.read_text().count('\n{"benchmark": ')
    with pytest.raises(SystemExit, match=r"no results of benchmarks/sparse_decode\.py"):
        results.cases("sparse_decode")
