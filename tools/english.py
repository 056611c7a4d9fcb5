"""Checks the prose of comments, docstrings and pages: `make lint` runs it.

    python tools/english.py [FILE ...]     without files, all that git tracks

It reports sentences that begin with a word that leaves out their subject, words of ours that the
field has a name for, and lines of prose that are too long. Headings and questions may begin with
any word. ALLOWED has sentences that are right nevertheless.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

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

# Another language, and what was.
SKIPPED = re.compile(r"CHANGELOG\.md|docs/zh/|README\.zh\.md")


Prose = Iterator[tuple[int, str]]  # a line, and the paragraph that begins there


def paragraphs(text: str, first: int) -> Prose:
    """Splits prose at blank lines and list items, and leaves out doctests."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], first):
        line = line.strip()
        code = line.startswith((">>>", "..."))
        if lines and (not line or code or re.match(r"([-*]|\d+\.) ", line)):
            yield number - len(lines), " ".join(lines)
            lines = []
        if line and not code:
            lines.append(re.sub(r"^([-*]|\d+\.) ", "", line))


def comments(source: str, pattern: str) -> Prose:
    """Joins comments of adjacent lines that begin in the same column."""
    block: list[str] = []
    first = column = -1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        found = re.search(pattern, line)
        if block and (found is None or found.start() != column):
            yield from paragraphs("\n".join(block), first)
            block = []
        if found:
            if not block:
                first, column = number, found.start()
            block.append(found[1])


def docstrings(node: ast.AST) -> Prose:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text is not None:
            yield from paragraphs(text, node.body[0].lineno)
    for child in getattr(node, "body", ()):
        yield from docstrings(child)


def python(source: str) -> Prose:
    yield from docstrings(ast.parse(source))
    yield from comments(source, r"(?:^| )# ?(.*)")


def cpp(source: str) -> Prose:
    return comments(source, r'(?<![:"])// ?(.*)')


def makefile(source: str) -> Prose:
    return comments(source, "^# ?(.*)")


def without_code(source: str) -> str:
    """Leaves out fenced blocks and formulas, keeping the count of lines."""
    fenced = re.compile(r"^ *(`{3,}|\$\$).*?^ *\1 *$", re.M | re.S)
    return fenced.sub(lambda match: "\n" * match[0].count("\n"), source)


def markdown(source: str) -> Prose:
    hidden = r"^(`{3,}|:{3,}).*$|^[|%<#].*$|^ {4,}.*$"
    return paragraphs(re.sub(hidden, "", without_code(source), flags=re.M), 1)


READERS = {
    ".py": python, ".pyi": python, ".cpp": cpp, ".h": cpp, ".md": markdown, "": makefile,
}  # fmt: skip


def findings(path: Path, source: str) -> Iterator[str]:
    for line, text in READERS[path.suffix](source):
        for sentence in re.split(r"(?<=[.?!:])[)\"']? (?=[A-Z])", text):
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


def main(names: Sequence[str] = ()) -> int:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    found = [
        finding
        for path in map(Path, names or tracked)
        if path.suffix in READERS and (path.suffix or path.name == "Makefile")
        if not SKIPPED.match(str(path)) and (ROOT / path).exists()
        for finding in findings(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
