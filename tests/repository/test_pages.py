"""The variables that pages list, and the translations of pages."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from support.checkout import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists() or not (ROOT / "docs").exists(), reason="no checkout"
)

VARIABLE = re.compile(
    r"""(?:getenv\(|environ(?:\.\w+)?[\[(]|timeout\()"([A-Z_]+)"|"((?:ASCEND_ATTN_OPS|CANN_SIM)[A-Z_]*)\""""
)
SOURCES = (
    "python", "csrc", "simulation", "tools", "benchmarks", "setup.py", "tests/npu", "tests/fuzz",
)  # fmt: skip


def test_every_environment_variable_has_a_row() -> None:
    files = [
        file
        for name in SOURCES
        for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
        if file.suffix in (".py", ".cpp", ".h")
    ]
    read = {
        first or second
        for file in files
        for first, second in VARIABLE.findall(file.read_text(encoding="utf-8"))
    }
    pages = ("docs/environment.md", "CONTRIBUTING.md", "simulation/README.md")
    rows = {
        x: re.findall(r"^\| (`.*?) \|", (ROOT / x).read_text(encoding="utf-8"), re.M) for x in pages
    }
    named = {page: set(re.findall(r"`([A-Z_]+)`", " ".join(found))) for page, found in rows.items()}
    listed = set().union(*named.values())
    unlisted = read - listed - {"RANK", "WORLD_SIZE", "PATH", "PYTHONPATH"}
    assert not unlisted, f"docs/environment.md has no row for {sorted(unlisted)}"
    ours = {x for x in read if x.startswith("ASCEND_ATTN_OPS")}
    assert "ASCEND_ATTN_OPS_LIMITS" in ours <= named["docs/environment.md"]
    tree = "".join(file.read_text(encoding="utf-8") for file in files)
    gone = {name for name in listed if name not in tree}
    assert not gone, f"nothing reads {sorted(gone)}"


# Stale Chinese pages are named, and their words are found. tools/lint.py compares their code.

QUERY = "打包序列的 block_table 长度 S1 为真, ok 值"
WORDS = ["打包", "包序", "序列", "列的", "block_table", "长度", "S1", "为真", "ok", "值"]


@pytest.fixture
def translations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    return importlib.import_module("translations")


def test_a_changed_english_page_is_named(
    translations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "DOCS", tmp_path)
    (tmp_path / "zh").mkdir()
    english, page, readme = (tmp_path / x for x in ("a.md", "zh/a.md", "README.zh.md"))
    english.write_text("one\n")
    page.write_text("<!-- english: ../a.md 0 -->\n")
    readme.write_text("<!-- english: a.md 0 -->\n")
    assert list(translations.stale()) == [readme, page]
    for file in (page, readme):
        translations.accept(file)
    assert list(translations.stale()) == []
    english.write_text("two\n")
    assert list(translations.stale()) == [readme, page]


def test_the_search_and_a_browser_split_a_query_alike(translations: ModuleType) -> None:
    assert translations.words(QUERY) == WORDS
    if shutil.which("node") is not None:
        script = f"{translations._SPLIT_QUERY}console.log(JSON.stringify(splitQuery({QUERY!r})))"
        assert json.loads(subprocess.check_output(["node", "-e", script], text=True)) == WORDS
