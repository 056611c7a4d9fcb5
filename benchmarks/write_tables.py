"""Write the tables and pictures of the documentation from the results of a run.

    python benchmarks/write_tables.py [RESULTS.json]

The results replace those of the same processor in results.json. Tables and pictures show the first
processor of that file; tables that it has not measured show the next one that has, and some show
all. Both name them. A table stands between two comments of a page, which do not show:

    <!-- bench: NAME -->
    <!-- bench end -->
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from results import Results, load, of_processor, save
from tables import NOT_MEASURED, TABLES, Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PLACE = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- bench end -->)", re.S)


def pages() -> dict[Path, str]:
    """Return the text of every page that has tables."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {path: text for path, text in texts.items() if "<!-- bench: " in text}


def text_of(name: str, machines: Sequence[Results]) -> str:
    table = TABLES[name]
    if not isinstance(table, Table):
        return table(machines)
    for results in machines:
        if text := table.text(results):
            first = results is machines[0]
            return text if first else f"Measured on {results.cpu}:\n\n{text}"
    return NOT_MEASURED


def with_tables(page: str, machines: Sequence[Results]) -> str:
    """Return the text of a page with new tables in their places."""
    if page.count("<!-- bench: ") != len(PLACE.findall(page)):
        raise ValueError("a table without an end")
    return PLACE.sub(lambda place: f"{place[1]}{text_of(place[2], machines)}\n{place[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    path = parser.parse_args().results
    machines = load(RESULTS)
    for results in load(path):
        before = of_processor(machines, results.cpu)
        if before is None:
            machines.append(results)
        else:
            machines[machines.index(before)] = results
    # All of them, before one is written.
    written = {path: with_tables(page, machines) for path, page in pages().items()}
    for path, page in written.items():
        path.write_text(page, encoding="utf-8")
    from pictures import PICTURES  # needs matplotlib, unlike the tables

    for name, picture in PICTURES.items():
        picture.draw(machines[0], ROOT / "docs" / "images" / name)
    save(RESULTS, machines)


if __name__ == "__main__":
    main()
