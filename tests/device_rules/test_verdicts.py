"""The documentation lists all differences between this library's checks and CANN's."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from device_rules.accepted_here import ACCEPTED_HERE, launched_otherwise
from device_rules.verdicts import OPERATORS, Answer, answers

PAGE = Path(__file__).parents[2] / "docs" / "specification" / "refused.md"

# Arguments that the device ignores in silence, and that are errors here.
IGNORED_THERE = "unless scatter_mode is 'Nct'"

# Calls that CANN's checks accept, and that its kernels were seen to compute wrongly.
WRONG_THERE = ("expected sparse_block_size (keys per block)", "head size in scatter mode 'Rope'")

# All other verdicts: the least share that agrees, and the largest share that only this library
# accepts. Sets whose launch passes other arguments than CANN was asked about do not count.
AGREE = 0.92
ONLY_HERE = 0.001


@functools.cache
def answers_of(operator: str) -> tuple[Answer, ...]:
    return tuple(answers(operator))


def accepted_here_alone(answer: Answer) -> bool:
    return not answer.accepted_there and answer.error_here is None


@functools.cache
def refused_on_purpose() -> dict[str, list[str]]:
    """For each operator, the excerpts of errors that the documentation's tables give."""
    excerpts: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        operator = section.split()[0].strip("`")
        cells = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
        excerpts[operator] = cells
    return excerpts


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_this_library_alone_refuses_is_documented(operator: str) -> None:
    alone = [a for a in answers_of(operator) if a.accepted_there and a.error_here is not None]
    excerpts = refused_on_purpose().get(operator, [])
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


def test_the_share_of_verdicts_that_agree() -> None:
    every = [
        answer
        for operator in OPERATORS
        for answer in answers_of(operator)
        if not any(text in (answer.error_here or "") for text in (IGNORED_THERE, *WRONG_THERE))
        and not (accepted_here_alone(answer) and launched_otherwise(answer.parameters))
    ]
    agree = sum(answer.agrees for answer in every) / len(every)
    only_here = sum(accepted_here_alone(a) for a in every) / len(every)
    assert agree >= AGREE, f"{agree:.1%} agree"
    assert only_here <= ONLY_HERE, f"{only_here:.2%} are accepted here alone"


def test_every_documented_refusal_happens() -> None:
    """A row that no set needs would be a claim that nothing checks."""
    for operator, excerpts in refused_on_purpose().items():
        errors = {a.error_here for a in answers_of(operator) if a.accepted_there and a.error_here}
        unused = [e for e in excerpts if not any(e in error for error in errors)]
        assert not unused, f"{PAGE.name}, {operator}: {unused}"
