"""The reports that users send of their devices: a table of the page, and the README's last column.

A report is what `python -m ascend_attn_check --json` writes, as a file in docs/hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ascend_attn_check.results import Result, read
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

FOLDER = Path(__file__).parents[1] / "hardware"
NOT_RUN = "not yet run"
# Facts of the section `environment`, and of the report.
COLUMNS = ("product", "CANN", "torch_npu", "ascend_attn_ops")


class Report(NamedTuple):
    facts: dict[str, str]
    results: list[Result]

    def verdict(self, operator: str | None = None) -> str:
        """Sums up all lines of the report, or those of an operator."""
        counts = Counter(
            result.verdict
            for result in self.results
            if operator is None or result.group.split()[0] == operator
        )
        if counts["differs"]:
            return f"{counts['differs']} differ"
        return "pass" if counts["pass"] else NOT_RUN


def reports(folder: Path = FOLDER) -> list[Report]:
    found = []
    for file in sorted(folder.glob("*.json")):
        header, results = read(file)
        facts = {x.id: x.text for x in results if x.section == "environment"}
        facts["CANN"] = facts.get("CANN", "").partition(",")[0]
        if not str(header["device"]).startswith("npu"):
            raise ValueError(f"{file}: expected a report of an NPU, got one of {header['device']}")
        found.append(Report(facts, results))
    return found


def status(operator: str, found: Sequence[Report]) -> str:
    """Returns the README's text about an operator on hardware."""
    verdicts = [
        f"{verdict} on {report.facts['product'].split()[0]}, CANN {report.facts['CANN']}"
        for report in found
        if (verdict := report.verdict(operator)) != NOT_RUN
    ]
    return "; ".join(verdicts) or NOT_RUN


class HardwareReports(Directive):
    def run(self) -> list[nodes.Node]:
        found = reports()
        if not found:
            text = "Nobody has sent a report yet: nothing here has run on an NPU."
            return [nodes.paragraph("", text)]
        rows = [(*(x.facts.get(name, "?") for name in COLUMNS), x.verdict()) for x in found]
        return [_table([(*COLUMNS, "check"), *rows])]


def _table(rows: Sequence[Sequence[str]]) -> nodes.table:
    group = nodes.tgroup("", cols=len(rows[0]))
    group += [nodes.colspec(colwidth=1) for _ in rows[0]]
    head, *body = (_row(cells) for cells in rows)
    group += [nodes.thead("", head), nodes.tbody("", *body)]
    return nodes.table("", group)


def _row(cells: Sequence[str]) -> nodes.row:
    def entries() -> Iterator[nodes.entry]:
        for cell in cells:
            yield nodes.entry("", nodes.paragraph("", cell))

    return nodes.row("", *entries())


def setup(app: Sphinx) -> ExtensionMetadata:
    app.add_directive("hardware-reports", HardwareReports)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
