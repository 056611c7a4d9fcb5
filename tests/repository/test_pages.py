"""README.md and the pages of docs: their links, and what they list from the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.checkout import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists() or not (ROOT / "docs").exists(), reason="no checkout"
)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MyST give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


def test_links_of_the_readme_resolve() -> None:
    """Sphinx checks those between pages of docs."""
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or anchor in anchors(ROOT / path), link


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
