"""The table of `make mutants`, whose runs take too long for every change."""

from __future__ import annotations

import pytest
from support.checkout import ROOT


def test_every_mutant_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import mutation

    mutants = mutation.all_mutants()
    assert len(mutants) == 131
    for mutant in mutants:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        begin, end = mutant.place(source)
        assert source[begin:end] != mutant.mutated
        assert all((ROOT / file).exists() for file in mutation.concerned(mutant.file))
