"""tools/english.py finds each kind of prose that it forbids, and finds none in the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkout import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="no checkout")

PYTHON = '''"""{prose}"""

value = 1
# {prose}
# It goes on.
'''


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def found(name: str, source: str) -> list[str]:
    import english

    return list(english.findings(Path(name), source))


@pytest.mark.parametrize(
    ("prose", "finding"),
    [
        ("Of the CPU kernels in bfloat16: 1024 tokens.", "begins with 'Of'"),
        ("Those of the package.", "begins with 'Those'"),
        ("Good. What works is printed.", "begins with 'What'"),
        ("Whoever reads it stumbles.", "begins with 'Whoever'"),
        ("One that waits is refused.", "begins with 'One that'"),
        ("That it works is tested.", "begins with 'That it'"),
        ("The lengths are prefix sums.", "'prefix sums'"),
        ("The form `out` allocates nothing.", "'form `out`'"),
        ("It holds rubbish.", "'rubbish'"),
    ],
)
def test_each_kind_is_found(prose: str, finding: str) -> None:
    for name, source, count in (
        ("README.md", f"# Of the title\n\n{prose}\n", 1),
        ("file.py", PYTHON.format(prose=prose), 2),
        ("file.h", f"// {prose}\nint value = 1;\n", 1),
        ("Makefile", f"# {prose}\nall:\n", 1),
    ):
        findings = found(name, source)
        assert len(findings) == count, (name, findings)
        assert all(finding in x for x in findings), findings


def test_long_lines_of_markdown_are_found() -> None:
    line = "word " * 25
    assert "expected 120 at most" in found("page.md", f"{line}\n")[0]
    assert not found("page.md", f"```\n{line}\n```\n\n| {line} |\n\n[{line}](page.md)\n")


@pytest.mark.parametrize(
    "prose", ["What is it?", "The whole. `Of` is code.", "[What the device does](a.md) says so."]
)
def test_other_sentences_are_not(prose: str) -> None:
    assert not found("page.md", f"# What it is\n\n{prose}\n")
    assert not found("file.py", f'"""{prose}"""\n')


def test_the_tree_is_clean() -> None:
    import english

    if not (ROOT / ".git").exists():
        pytest.skip("git lists the files of a clone alone")
    assert english.main([]) == 0
