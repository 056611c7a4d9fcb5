"""The reports of devices in docs/hardware, and the README's column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ascend_attn_ops.check.results import FORMAT, Result, write
from ascend_attn_ops.check.samples import OPERATORS
from support.checkout import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="no checkout")


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    import hardware_reports

    return hardware_reports


def test_the_readme_says_what_the_reports_say(extension) -> None:  # type: ignore[no-untyped-def]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Status")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)`.*\| ([^|]+) \|$", section, re.M))
    said = {name: text for name, text in rows.items() if name in OPERATORS}
    assert len(said) >= 7
    assert said == {name: extension.status(name, extension.reports()) for name in said}


def test_reports_make_rows(extension, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    facts = [Result("environment", "product", "product", "pass", "A2 with CANN 9.0"),
             Result("environment", "CANN", "CANN", "pass", "9.0.0, <CANN>/lib64")]  # fmt: skip
    for verdict in ("differs", "pass"):
        line = Result("numbers", "flash_attention_score bfloat16", "numbers/1", verdict)
        header = {"format": FORMAT, "device": "npu:0"}
        write(tmp_path / f"{verdict}.json", header, [*facts, line])
    first, second = extension.reports(tmp_path)
    assert (first.facts["CANN"], first.verdict(), second.verdict()) == ("9.0.0", "1 differ", "pass")
    assert extension.status("flash_attention_score", [second]) == "pass on A2, CANN 9.0.0"
    assert extension.status("lightning_indexer", [second]) == extension.NOT_RUN
    write(tmp_path / "cpu.json", {"format": FORMAT, "device": "cpu"}, facts)
    with pytest.raises(ValueError, match="expected a report of an NPU, got one of cpu"):
        extension.reports(tmp_path)
