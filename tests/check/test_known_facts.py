"""The facts that the check tries are those of the page, and their names are unique."""

from __future__ import annotations

import re

import pytest
from ascend_attn_ops.check.known_facts import FACTS, Fact
from support.checkout import ROOT

PAGE = (ROOT / "docs/specification/device.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.id)
def test_a_fact_is_quoted_from_the_page(fact: Fact) -> None:
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = (x for x in section if x.splitlines()[0] == fact.operator)
    assert fact.quote in " ".join(text.split())


def test_names_are_unique() -> None:
    names = [fact.id for fact in FACTS]
    assert len(names) == len(set(names))
