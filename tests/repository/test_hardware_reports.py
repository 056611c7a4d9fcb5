"""The reports of devices in docs/hardware, the table of the page, and the README's column."""

from __future__ import annotations

import re
from dataclasses import asdict
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


def report(folder: Path, name: str, verdict: str, device: str = "npu:0") -> None:
    facts = {"product": "A2 with CANN 9.0", "CANN": "9.0.0, <CANN>/lib64", "torch_npu": "2.13.0"}
    facts |= {"ascend_attn_ops": "0.1.0"}
    results = [Result("environment", x, x, "pass", text) for x, text in facts.items()]
    results.append(Result("numbers", "flash_attention_score bfloat16", "numbers/1", verdict))
    assert asdict(results[0])
    write(folder / f"{name}.json", {"format": FORMAT, "device": device}, results)


def test_the_readme_says_what_the_reports_say(extension) -> None:  # type: ignore[no-untyped-def]
    found = extension.reports()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Status")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `(\w+)`.*\| ([^|]+) \|$", section, re.M)
    hardware = {name: text for name, text in table if name in OPERATORS}
    rows = {name: extension.status(name, found) for name in hardware}
    assert len(rows) >= 7
    assert hardware == rows


def test_reports_make_rows(extension, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert extension.reports(tmp_path) == []
    report(tmp_path, "a", "pass")
    report(tmp_path, "b", "differs")
    first, second = extension.reports(tmp_path)
    assert first.facts["CANN"] == "9.0.0"
    assert (first.verdict(), second.verdict()) == ("pass", "1 differ")
    assert extension.status("flash_attention_score", [first]) == "pass on A2, CANN 9.0.0"
    assert extension.status("lightning_indexer", [first]) == extension.NOT_RUN


def test_a_report_of_the_cpu_is_no_evidence(extension, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    report(tmp_path, "a", "pass", device="cpu")
    with pytest.raises(ValueError, match="expected a report of an NPU, got one of cpu"):
        extension.reports(tmp_path)
