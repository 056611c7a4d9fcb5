"""Which parameters of a test run in this commit, where a few of many are enough.

Two marks divide the suite. `make test` runs the commit tier, `make test-all` (pytest's `--all`)
everything:

    pytestmark = nightly                    # left out of the commit tier
    @by_turns(4)                            # a fourth of the parameters per commit
    pytest.param(x, marks=nightly)          # one parameter left out

The parameters of a function stand in a fixed random order, which the seed cuts into blocks: four
consecutive seeds run all parameters of `by_turns(4)`. A choice is never without a pair of
(operator, dtype), (operator, layout) or (operator, mode), and of a test without operators never
without a value or a pair of values. The seed is that of the commit, or SEED in the environment.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

nightly = pytest.mark.nightly
by_turns = pytest.mark.by_turns

# An axis of more values is a list of cases, of which nothing must be in every choice.
LONGEST_AXIS = 16


@cache
def seed() -> int:
    """Returns SEED, or else the commit as a number; 0 outside a checkout."""
    if given := os.environ.get("SEED"):
        return int(given, 0)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return 0
    return int(commit or "0", 16)


def traits(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the parameters say of a test: its operator, layout, mode and other values."""
    found = {}
    for name, value in parameters.items():
        operator = getattr(value, "operator", value)
        if not hasattr(operator, "overload"):
            # Printing a tensor whose memory was freed crashes.
            found[name] = str(value if isinstance(value, str | int | float) else id(value))
            continue
        found["operator"] = operator.name
        if hasattr(value, "layout"):
            found["layout"] = value.layout
        if (mode := getattr(getattr(value, "case", None), "mode", None)) is not None:
            found["mode"] = str(mode)
    return found


def pairs(all_traits: Iterable[Mapping[str, str]]) -> list[set[Any]]:
    """Returns for each test the values and pairs of values that a choice must have."""
    rows = list(all_traits)
    values: dict[str, set[str]] = {}
    for row in rows:
        for axis, value in row.items():
            values.setdefault(axis, set()).add(value)
    short = {axis for axis, x in values.items() if axis == "operator" or len(x) <= LONGEST_AXIS}
    found: list[set[Any]] = []
    for row in rows:
        mine = [(axis, value) for axis, value in row.items() if axis in short]
        both = combinations(mine, 2)
        if "operator" in values:
            both = ((x, y) for x, y in both if "operator" in (x[0], y[0]))  # type: ignore[assignment]
        found.append({*mine, *both})
    return found


def choose(name: str, parameters: list[Mapping[str, Any]], share: int, turn: int) -> list[int]:
    """Returns the numbers of the tests of the function `name` that run in this turn."""
    order = list(range(len(parameters)))
    random.Random(name).shuffle(order)
    chosen = set(order[turn % share :: share])
    wanted = pairs(map(traits, parameters))
    missing = set().union(*wanted).difference(*(wanted[i] for i in chosen))
    random.Random(f"{name} {turn}").shuffle(order)
    # Parameters with more of the missing pairs come first.
    for i in sorted(order, key=lambda i: -len(wanted[i] & missing)):
        if wanted[i] & missing:
            chosen.add(i)
            missing -= wanted[i]
    return sorted(chosen)


def first_of_each(
    recipes: Iterable[Any], kind: Callable[[Any], Any], per_commit: Callable[[Any], Any]
) -> list[ParameterSet]:
    """Returns the first recipe of each kind, as parameters of a test.

    The commit tier has the first of each value of `per_commit`, everything the others as well.
    """
    kinds: dict[Any, Any] = {}
    commit: dict[Any, Any] = {}
    for recipe in recipes:
        first = kinds.setdefault(kind(recipe), recipe)
        commit.setdefault(per_commit(recipe), first)
    return [
        pytest.param(x, id=x.id, marks=() if x in commit.values() else nightly)
        for x in kinds.values()
    ]


def select(items: list[pytest.Item], everything: bool, share: int) -> list[pytest.Item]:
    """Returns the tests of the tier; with a share, of each function a part at most that large."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if everything or not item.get_closest_marker("nightly"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for name, tests in functions.items():
        mark = tests[0].get_closest_marker("by_turns")
        parts = max(share, 1 if everything or mark is None else mark.args[0])
        if parts > 1 and len(tests) > 1:
            parameters = [x.callspec.params for x in tests]  # type: ignore[attr-defined]
            tests = [tests[i] for i in choose(name, parameters, parts, seed())]
        kept.update(tests)
    return [x for x in items if x in kept]


# Hooks of pytest, which each conftest.py at the top of a tree of tests imports.
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what the commit tier leaves out")
    parser.addoption(
        "--share", type=int, default=1, metavar="N",
        help="of every test function, run an N-th of the parameters (tests/support/turns.py)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: left out of the commit tier")
    config.addinivalue_line("markers", "by_turns(n): an n-th of the parameters in the commit tier")
    config.addinivalue_line("markers", "smoke: also run with an older torch before each commit")


def pytest_report_header() -> str:
    return f"parameters by turns: SEED={seed():#x}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = select(items, config.getoption("all"), config.getoption("share"))
    if left_out := set(items) - set(kept):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept
