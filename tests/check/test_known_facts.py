"""The facts that the check tries are those of the page, and their names are unique."""

from __future__ import annotations

import re

import pytest
from ascend_attn_check.known_facts import FACTS, Fact
from ascend_attn_check.samples import OPERATORS
from support.checkout import ROOT

PAGE = (ROOT / "docs/device.md").read_text(encoding="utf-8")
SECTIONS = {
    section.splitlines()[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}
# Behind a paragraph: it explains the one before or says what this library does, or why no probe
# tries it. Behind a table, why none tries a row.
MARK = re.compile(r"^% (?:explanation|not probed: .+)$", re.MULTILINE)
OF_ROW = re.compile(r'^% not probed, "(.+)": .+$', re.MULTILINE)


def blocks(section: str) -> list[str]:
    """The paragraphs and the rows of tables, each on one line."""
    found = []
    for block in re.split(r"\n\s*\n", section)[1:]:
        if block.startswith("|"):
            found += [line.strip("| ") for line in block.splitlines()[2:]]
        elif not block.startswith("% ") and not MARK.search(block):
            found.append(" ".join(block.split()))
    return [x for x in found if x]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.id)
def test_a_fact_is_quoted_from_the_page(fact: Fact) -> None:
    assert any(fact.quote in block for block in blocks(SECTIONS[fact.operator]))


@pytest.mark.parametrize("operator", [x for x in SECTIONS if x in OPERATORS])
def test_every_statement_of_the_page_is_probed_or_has_a_reason(operator: str) -> None:
    quotes = [x.quote for x in FACTS if x.operator == operator]
    quotes += OF_ROW.findall(SECTIONS[operator])
    assert [x for x in blocks(SECTIONS[operator]) if not any(y in x for y in quotes)] == []


def test_names_are_unique() -> None:
    names = [fact.id for fact in FACTS]
    assert len(names) == len(set(names))
