"""The facts that the check tries are those of the page, and their names are unique."""

from __future__ import annotations

import re

import pytest
from ascend_attn_check.known_facts import FACTS
from ascend_attn_check.samples import OPERATORS
from support.checkout import ROOT

PAGE = (ROOT / "docs/device.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
HEADER = "| on a device | this library | probe |\n|---|---|---|\n"
# In the last column, beside the ids of facts: what tries a row, or why nothing does.
OTHERS = ", ".join(re.findall(r"^- ([a-z, ]+):", PAGE.partition("\n## ")[0], re.M)).split(", ")


@pytest.mark.parametrize(
    "operator", [x for x in SECTIONS if x in OPERATORS or HEADER in SECTIONS[x]]
)
def test_the_page_has_the_facts_of_an_operator(operator: str) -> None:
    """Each in one row, as all that the page states; a row that nothing tries says why."""
    table, *notes = SECTIONS[operator].strip().split("\n\n")
    assert table.startswith(HEADER)
    assert [x for x in notes if not x.startswith("**Accepted only here:** ")] == []
    cells = [row.rpartition(" | ")[2].strip(" |") for row in table.splitlines()[2:]]
    ids = [x.strip("`") for x in cells if x not in OTHERS]
    assert sorted(ids) == sorted(fact.id for fact in FACTS if fact.operator == operator)


def test_every_fact_has_a_section_and_a_name_of_its_own() -> None:
    assert {fact.operator for fact in FACTS} <= SECTIONS.keys()
    names = [fact.id for fact in FACTS]
    assert len(names) == len(set(names))
