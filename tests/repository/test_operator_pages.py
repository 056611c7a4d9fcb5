"""The tables of arguments and limits on the pages of operators, and the links of all pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ascend_attn_check.samples import OPERATORS
from support.checkout import ROOT
from support.pages import FENCE

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="no checkout")

OPERATOR_PAGES = ROOT / "docs" / "operators"


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("simulation/*.md"), *ROOT.glob("docs/**/*.md")])


def page_of(operator: str) -> Path:
    """A gradient stands on the page of its forward, if it has one."""
    stem = operator.removesuffix("_")
    forward = OPERATOR_PAGES / f"{stem.removesuffix('_grad')}.md"
    return forward if forward.exists() else OPERATOR_PAGES / f"{stem}.md"


def rows_of(page: Path) -> Iterator[tuple[str, str, bool]]:
    of_options = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            first, second = (x.strip() for x in re.split(r"(?<!\\)\|", line)[1:3])
            of_options = second == "default" or (of_options and first != "argument")
            yield first, second, of_options
        else:
            of_options = False


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_arguments_of_an_operator(operator: str) -> None:
    """Each has a row on the operator's page, and an option its default; limits have a place."""
    rows = list(rows_of(page_of(operator)))
    assert f"<!-- limits: {operator} -->" in page_of(operator).read_text(encoding="utf-8")
    for argument in getattr(torch.ops.ascend, operator).default._schema.arguments:
        of_it = [row for row in rows if f"`{argument.name}`" in row[0]]
        assert of_it, f"{argument.name} has no row"
        # A gradient may have a default of its own, in a row of its own.
        defaults = [x.strip("`") for _, x, of_options in of_it if of_options]
        has_default = argument.has_default_value()
        said = [eval(x) for x in defaults if x != "required"] if has_default else defaults
        assert not said or (argument.default_value if has_default else "required") in said, said


def test_the_tables_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import page_tables

    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text == page_tables.with_tables(text), f"{page}: run python tools/page_tables.py"


def anchors(page: Path) -> set[str]:
    """The anchors that a host gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    names = set()
    for heading in headings:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        names.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return names


@pytest.mark.parametrize("page", pages(), ids=lambda x: str(x.relative_to(ROOT)))
def test_the_links_of_a_page(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "`", text)):
        path, _, anchor = link.partition("#")
        if not re.match(r"https?://|mailto:", link):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_the_documentation_is_short() -> None:
    names = [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").rglob("*.md")]
    lines = {x: len(x.read_text(encoding="utf-8").splitlines()) for x in names}
    assert sum(lines.values()) <= 6500
    assert sum(n for x, n in lines.items() if "zh" in x.parts or ".zh" in x.name) <= 1500
    assert all(lines[x] <= 110 for x in names[:2])
    assert lines[ROOT / "docs/performance.md"] <= 200
