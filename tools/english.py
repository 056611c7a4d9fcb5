"""Checks the prose of comments, docstrings and pages: `make lint` runs it.

    python tools/english.py [FILE ...]     without files, all that git tracks

It reports sentences that begin with a word that leaves out their subject, words of ours that the
field has a name for, and lines of prose that are too long. Headings and questions may begin with
any word. ALLOWED has sentences that are right nevertheless.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

OPENINGS = re.compile(r"(Of|Those|What(ever)?|One that|Who(ever)?|That it)\b")
WORDS = {
    r"prefix sums?": "cumulative lengths",
    r"forms? `+out`+": "`out=` overload",
    r"(keys in parts|parts of keys)": "split-KV",
    r"rubbish": "uninitialised memory",
    r"numbers of threads": "thread counts",
    r"(left|lie|lies|copied) side by side": "contiguous",
    r"gradients? (that is|are|is) wanted": "required gradient",
}
LONGEST_LINE = 120

# Beginnings of sentences, each with its reason.
ALLOWED: dict[str, str] = {}

# Texts of others, and of what was.
SKIPPED = ("LICENSE", "CHANGELOG.md")


class Prose(NamedTuple):
    """A paragraph, comment or docstring, and the line on which it begins."""

    line: int
    text: str


def python_prose(source: str) -> Iterator[Prose]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                first = node.body[0].lineno
                for paragraph, line in paragraphs(docstring):
                    yield Prose(first + line, paragraph)
    comments = [
        (token.start[0], token.start[1], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from joined(comments, "#")


def cpp_prose(source: str) -> Iterator[Prose]:
    comments = [
        (number, match.start(), match[0])
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.search(r'(?<![:"])//.*', line))
    ]
    yield from joined(comments, "//")


def joined(comments: list[tuple[int, int, str]], mark: str) -> Iterator[Prose]:
    """Joins comments of adjacent lines that begin in the same column."""
    block: list[str] = []
    first = last = column = -1
    for line, start, text in [*comments, (-9, -9, "")]:
        if block and (line != last + 1 or start != column):
            for paragraph, offset in paragraphs("\n".join(block)):
                yield Prose(first + offset, paragraph)
            block = []
        if not block:
            first = line
        block.append(text.lstrip(mark).strip() if text else "")
        last, column = line, start


def paragraphs(text: str) -> Iterator[tuple[str, int]]:
    """Splits prose at blank lines and list items; code and doctests are left out."""
    lines: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""]):
        stripped = line.strip()
        begins = re.match(r"([-*]|\d+\.|>>>|\.\.\.) ", stripped)
        if (not stripped or begins) and lines:
            yield " ".join(lines), first
            lines = []
        if stripped and not stripped.startswith((">>>", "...")):
            if not lines:
                first = number
            lines.append(re.sub(r"^([-*]|\d+\.) ", "", stripped))


def markdown_prose(source: str) -> Iterator[Prose]:
    text = re.sub(r"^(`{3,}|:{3,}).*$|^[|%<#].*$|^ {4,}.*$", "", without_code(source), flags=re.M)
    for paragraph, line in paragraphs(text):
        yield Prose(line + 1, paragraph)


def without_code(source: str) -> str:
    """Empties fenced blocks and formulas, keeping the count of lines."""
    return re.sub(
        r"^ *(`{3,}|\$\$).*?^ *\1 *$",
        lambda match: "\n" * match[0].count("\n"),
        source,
        flags=re.M | re.S,
    )


def makefile_prose(source: str) -> Iterator[Prose]:
    numbered = enumerate(source.splitlines(), 1)
    yield from joined([(n, 0, line) for n, line in numbered if line.startswith("#")], "#")


READERS = {
    ".py": python_prose,
    ".pyi": python_prose,
    ".cpp": cpp_prose,
    ".h": cpp_prose,
    ".md": markdown_prose,
    "": makefile_prose,
}


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.?!:])[)\"']? (?=[A-Z])", text)


def findings(path: Path, source: str) -> Iterator[str]:
    for line, text in READERS[path.suffix](source):
        for sentence in sentences(text):
            plain = re.sub(r"^[*_(]+", "", sentence)
            opening = OPENINGS.match(plain)
            if opening and not plain.endswith("?") and not plain.startswith(tuple(ALLOWED)):
                yield f"{path}:{line}: begins with '{opening[0]}': {sentence[:60]}"
        for word, better in WORDS.items():
            if match := re.search(rf"\b{word}", text, re.I):
                yield f"{path}:{line}: '{match[0]}': expected {better}"
    if path.suffix == ".md":
        for number, row in enumerate(without_code(source).splitlines(), 1):
            # A link or a table cannot be broken everywhere.
            if len(row) > LONGEST_LINE and not re.match(r" {4}|\s*\||.*\]\(|%|<", row):
                yield f"{path}:{number}: {len(row)} characters, expected {LONGEST_LINE} at most"


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    read = [x for x in names if Path(x).suffix in READERS and (ROOT / x).exists()]
    return [ROOT / x for x in read if not x.startswith("docs/zh/") and x != "README.zh.md"]


def main(names: list[str]) -> int:
    paths = [Path(x).resolve() for x in names] or tracked()
    found = [
        finding
        for path in paths
        if path.name not in SKIPPED and (path.suffix or path.name == "Makefile")
        for finding in findings(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
