"""The blocks of Python on the documentation's pages.

A block of text directly behind one is what it writes, with its error in the last line. A block that
cannot run here has a comment before it: <!-- not run: it needs an NPU -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(
    r"^(?P<reason><!-- not run: [^\n]+ -->\n)?^```(?P<language>\S*)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.M | re.S,
)


class Block(NamedTuple):
    code: str
    output: str | None  # as the page shows it

    @property
    def raises(self) -> bool:
        return bool(re.search(r"^\w+Error: .*\n\Z", self.output or "", re.M))


def blocks_of(page: Path, runs: bool = True) -> list[Block]:
    """The blocks of a page that run here, or those that do not."""
    fences = FENCE.finditer(page.read_text(encoding="utf-8"))
    found = [x for x in fences if x["language"] == "python" and (not x["reason"]) == runs]
    return [Block(x["code"], x["output"]) for x in found]
