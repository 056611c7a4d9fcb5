"""Every part of the code uses only what stands below it: the tables are in support/layers.py."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest
from support.layers import TREES, Tree

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
