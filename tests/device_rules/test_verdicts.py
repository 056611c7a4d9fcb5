"""The documentation lists all differences between this library's checks and CANN's."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from device_rules.accepted_here import ACCEPTED_HERE
from device_rules.verdicts import OPERATORS, Answer, answers

PAGE = Path(__file__).parents[2] / "docs" / "device.md"

# The answers of an operator are computed once: all of this runs in one worker.

# For each operator: the verdicts that agree with this library, and the parameter sets that only
# this library accepts, as `python -m device_rules` prints them.
COUNTS = {
    "flash_attention_score": (6693, 8), "flash_attention_score_grad": (7046, 5),
    "lightning_indexer": (7263, 41), "lightning_indexer_grad": (6073, 78),
    "prompt_flash_attention": (5942, 24), "scatter_pa_kv_cache": (9155, 30),
    "sparse_flash_attention": (7346, 95), "sparse_flash_attention_grad": (6069, 38),
    "sparse_lightning_indexer_grad_kl_loss": (6935, 467),
}  # fmt: skip


@functools.cache
def answers_of(operator: str) -> tuple[Answer, ...]:
    return tuple(answers(operator))


def accepted_here_alone(answer: Answer) -> bool:
    return not answer.accepted_there and answer.error_here is None


@functools.cache
def refused_on_purpose() -> dict[str, list[str]]:
    """For each section, the excerpts of errors that the documentation's tables give."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        cells = re.findall(r"\| error (`[^|]+) \|", section)
        found[section.splitlines()[0].rstrip("_")] = re.findall("`([^`]+)`", " ".join(cells))
    return found


def covers(section: str, operator: str) -> bool:
    """One section holds for all sparse operators."""
    sparse = operator.startswith(("lightning_", "sparse_"))
    return section == operator or (section == "Sparse operators" and sparse)


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_this_library_alone_refuses_is_documented(operator: str) -> None:
    alone = [a for a in answers_of(operator) if a.accepted_there and a.error_here is not None]
    sections = refused_on_purpose().items()
    excerpts = [x for section, found in sections if covers(section, operator) for x in found]
    missing = {a.rule for a in alone if not any(e in (a.error_here or "") for e in excerpts)}
    assert not missing, f"{PAGE.name} has no row for:\n" + "\n".join(sorted(missing))


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_this_library_alone_accepts_is_documented(operator: str) -> None:
    alone = [a for a in answers_of(operator) if accepted_here_alone(a)]
    classes = ACCEPTED_HERE.get(operator, {})
    page = PAGE.read_text(encoding="utf-8")
    assert all(name in page for name in classes), f"{PAGE.name} does not name a class"
    missing = [a for a in alone if not any(of(a.parameters) for of in classes.values())]
    assert not missing, [(a.device, a.parameters.arguments) for a in missing[:5]]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_verdicts_that_agree(operator: str) -> None:
    agree = sum(a.agrees for a in answers_of(operator))
    assert (agree, sum(map(accepted_here_alone, answers_of(operator)))) == COUNTS[operator]


def test_every_documented_refusal_happens() -> None:
    """A row that no set needs would be a claim that nothing checks."""
    for section, excerpts in refused_on_purpose().items():
        found = [a for x in OPERATORS if covers(section, x) for a in answers_of(x)]
        errors = {a.error_here for a in found if a.accepted_there and a.error_here}
        unused = [e for e in excerpts if not any(e in error for error in errors)]
        assert not unused, f"{PAGE.name}, {section}: {unused}"
