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


@pytest.mark.parametrize("tree", [TREES["python"]], ids=["python"])
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
