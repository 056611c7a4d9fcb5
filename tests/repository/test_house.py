"""The picture in docs/design.md is that of the tree: test_layers.py compares tables and code."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import PurePosixPath

import pytest
from support.checkout import ROOT
from support.layers import AROUND, TREES

PAGE = ROOT / "docs" / "design.md"


def test_the_picture_is_drawn_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    house = importlib.import_module("house")
    assert house.PICTURE.read_text(encoding="utf-8") == house.svg(), "run tools/house.py"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a git checkout")
def test_every_folder_is_in_the_picture_and_has_a_paragraph() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--", "*/*"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    folders = {PurePosixPath(name).parents[-2] for name in listed if not name.startswith(".")}
    assert {str(x) for x in folders} == {"csrc", "python", *AROUND}
    named = {*AROUND}
    for tree in TREES.values():
        files = [ROOT / name for name in listed if (ROOT / name).is_relative_to(tree.folder)]
        below = {x.relative_to(tree.folder).parts[0] for x in files if x.parent != tree.folder}
        assert below <= set(tree.parts)
        named |= {str((tree.folder / x).relative_to(ROOT)) for x in below}
    paragraphs = re.findall(r"^\*\*`(.+?)/`", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(paragraphs) == sorted(named)
