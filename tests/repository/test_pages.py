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
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.M)
        for name in re.findall(r"`([A-Z_]+)`", row)
    }
    assert "ASCEND_ATTN_OPS_LIMITS" in read
    unlisted = read - listed - {"RANK", "WORLD_SIZE", "PATH", "PYTHONPATH"}
    assert not unlisted, f"docs/environment.md has no row for {sorted(unlisted)}"
    tree = "".join(file.read_text(encoding="utf-8") for file in files)
    gone = {name for name in listed if name not in tree}
    assert not gone, f"nothing reads {sorted(gone)}"
