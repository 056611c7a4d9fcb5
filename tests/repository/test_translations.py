"""The Chinese pages: their code is that of the English ones, and what is stale is named."""

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

pytestmark = pytest.mark.skipif(not (ROOT / "docs/zh").exists(), reason="no checkout")

PAGES = [ROOT / "README.zh.md", *sorted((ROOT / "docs/zh").glob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n.*?^```$", re.M | re.S)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda x: x.stem)


@pytest.fixture
def translations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    return importlib.import_module("translations")


def code_of(page: Path) -> list[str]:
    """Without contents, which differ, and includes of English text."""
    found = FENCE.findall(text_of(page))
    return [x for x in found if not x.startswith(("```{toctree}", "```{include}"))]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@each_page
def test_code_is_that_of_the_english_page(page: Path, translations: ModuleType) -> None:
    assert code_of(page) == code_of(translations.english_of(page))


@each_page
def test_a_page_says_that_nobody_has_checked_it(page: Path, translations: ModuleType) -> None:
    text = text_of(page)
    assert "尚未经母语读者审阅" in text
    assert f"]({translations.link_to_english(page)})" in text


@each_page
def test_anchors_are_the_english_ones(page: Path, translations: ModuleType) -> None:
    """Links into a page hold in both languages."""
    if page.parent == ROOT or page.stem == "index":
        pytest.skip("nothing links into it")
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(translations.english_of(page))), re.M)
    slugs = {re.sub(r"[^\w -]", "", x.lower()).strip().replace(" ", "-") for x in headings[1:]}
    assert slugs <= set(re.findall(r"^\(([\w-]+)\)=$", text_of(page), re.M))


def test_the_readmes_link_to_each_other() -> None:
    first = [text_of(ROOT / name).partition("\n")[0] for name in ("README.md", "README.zh.md")]
    assert "(README.zh.md)" in first[0]
    assert "(README.md)" in first[1]
    assert len(text_of(ROOT / "README.zh.md").splitlines()) <= 120


def test_a_changed_english_page_is_named(
    translations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs/zh").mkdir(parents=True)
    english, page = tmp_path / "docs/a.md", tmp_path / "docs/zh/a.md"
    readme, other = tmp_path / "README.md", tmp_path / "README.zh.md"
    for file in (english, readme):
        file.write_text("one\n")
    page.write_text("% english: ../a.md 0\n")
    other.write_text("<!-- english: README.md 0 -->\n")
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "DOCS", tmp_path / "docs")
    assert list(translations.stale()) == [other, page]
    for file in (page, other):
        translations.accept(file)
    assert list(translations.stale()) == []
    english.write_text("two\n")
    assert list(translations.stale()) == [page]


QUERY = "打包序列的 block_table 长度 S1 为真, ok 值"
WORDS = ["打包", "包序", "序列", "列的", "block_table", "长度", "S1", "为真", "ok", "值"]


def test_words_of_the_search(translations: ModuleType) -> None:
    assert translations.words(QUERY) == WORDS


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_a_browser_splits_a_query_alike(translations: ModuleType) -> None:
    script = f"{translations._SPLIT_QUERY}console.log(JSON.stringify(splitQuery({QUERY!r})))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == WORDS
