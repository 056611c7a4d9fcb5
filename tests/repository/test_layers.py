"""Every part of the code uses only what stands below it: the tables are in support/layers.py."""

from __future__ import annotations

import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

import pytest
from support.checkout import ROOT
from support.layers import AROUND, TREES, Tree

each_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def uses(tree: Tree) -> dict[tuple[str, str], list[str]]:
    """By the part that uses and the part that is used, which files do."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in tree.files():
        part = tree.part_of(file)
        for used in tree.used_by(file):
            other = tree.part_of(used)
            if part != other:
                line = f"{tree.name(file)} uses {tree.name(used)}"
                found.setdefault((part, other), []).append(line)
    return found


@each_tree
def test_a_part_uses_what_it_may(tree: Tree) -> None:
    found = uses(tree)
    wrong = {(x, y): files for (x, y), files in found.items() if y not in tree.below(x)}
    assert wrong == {}
    arrows = {(name, other) for name, part in tree.parts.items() for other in part.below}
    assert arrows <= set(found), "a part does not use what it is said to stand on"


@each_tree
def test_no_file_uses_itself(tree: Tree) -> None:
    """Not through others either."""
    graph = {file: set(tree.used_by(file)) - {file} for file in tree.files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is used by ".join(map(tree.name, error.args[1])))


@pytest.mark.parametrize(
    ("inner", "below"), [("npu/aclnn", ("core",)), ("cpu/common", ("core", "dispatch", "ops"))]
)
def test_what_files_of_a_folder_share_uses_none_of_them(inner: str, below: tuple[str, ...]) -> None:
    csrc = TREES["csrc"]
    for file in csrc.files():
        if csrc.name(file).startswith(inner):
            used = [csrc.name(x) for x in csrc.used_by(file)]
            assert all(x.startswith((inner, *below)) for x in used), (csrc.name(file), used)


def test_the_picture_of_the_docs_shows_the_tables() -> None:
    """Each part, what it is, and an arrow to each part on which it stands."""
    picture = (ROOT / "docs/images/house.svg").read_text(encoding="utf-8")
    shown = re.findall(r'<g id="(\S+)".*\n.*\n.*\n.*>(.+)</text>', picture)
    arrows = re.findall(r'<path id="(\w+/\S+)"', picture)
    parts = [(f"{tree}/{name}", part) for tree in TREES for name, part in TREES[tree].parts.items()]
    assert sorted(shown) == sorted([*((name, part.what) for name, part in parts), *AROUND.items()])
    assert sorted(arrows) == sorted(f"{name}-{x}" for name, part in parts for x in part.below)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a git checkout")
def test_every_folder_has_a_paragraph() -> None:
    listed = subprocess.check_output(["git", "ls-files", "*/*"], cwd=ROOT, text=True).splitlines()
    files = [PurePosixPath(name) for name in listed if not name.startswith(".")]
    of_file = ("/".join(x.parts[: 1 + (x.parts[0] == "python")]) for x in files)
    folders = set(of_file) - {"csrc", "python/ascend_attn_ops"}
    assert folders == AROUND.keys()
    for name, tree in TREES.items():
        root = tree.folder.relative_to(ROOT)
        below = {x.relative_to(root).parts[0] for x in files if root in x.parents[1:]}
        assert below <= tree.parts.keys(), name
        folders |= {str(root / x) for x in below}
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^- \*\*`(.+?)/`", page, re.M)) == sorted(folders)
