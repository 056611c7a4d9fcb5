"""Writes the tables of the documentation that the package knows: limits by product, and names.

    python tools/page_tables.py

A table stands between two comments of a page, which do not show:

    <!-- limits: NAME OF AN OPERATOR -->      <!-- names: NAME OF A MODULE -->
    <!-- limits end -->                       <!-- names end -->
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ascend_attn_ops._core.device_limits import table

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- (limits|names): (\w+) -->\n).*?(<!-- \2 end -->)", re.S)
POWERS = {str(2**n - 1): f"2^{n} - 1" for n in (31, 63)}


def names_of(devices: list[tuple[str, str]], versions: set[str]) -> str:
    """A2, A3 (CANN 9.1): products, with the versions of CANN where not all are meant."""
    of_product: dict[str, list[str]] = {}
    for product, cann in devices:
        of_product.setdefault(product, []).append(cann)
    with_canns: dict[str, list[str]] = {}
    for product, canns in of_product.items():
        some = "" if set(canns) == versions else f" (CANN {', '.join(canns)})"
        with_canns.setdefault(some, []).append(product)
    return ", ".join(f"{', '.join(products)}{some}" for some, products in with_canns.items())


def rules_of(variants: list[dict[str, Any]]) -> list[list[str]]:
    """A row for the rules of an argument that the same devices have."""
    texts: dict[tuple[str, ...], list[str]] = {}
    for name, text in dict.fromkeys(tuple(rule) for x in variants for rule in x["rules"]):
        marks = ("required" if (name, text) in map(tuple, x["rules"]) else "" for x in variants)
        texts.setdefault((f"`{name}`", *marks), []).append(text.removesuffix(","))
    return [[name, "; ".join(rules), *marks] for (name, *marks), rules in texts.items()]


def limits_table(devices: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Quantities down, devices across; devices that accept the same share a column."""
    columns: dict[str, list[tuple[str, str]]] = {}
    for device, accepted in devices.items():
        columns.setdefault(repr(accepted), []).append(device)
    variants = [devices[same[0]] for same in columns.values()]
    versions = {cann for _, cann in devices}
    meanings = {name: meaning for x in variants for name, meaning, _ in x["limits"]}
    allowed = [{name: POWERS.get(text, text) for name, _, text in x["limits"]} for x in variants]
    rows = [
        ["", "", *(names_of(same, versions) for same in columns.values())],
        ["---"] * (2 + len(variants)),
        ["dtype", "", *(", ".join(x["dtypes"]) for x in variants)],
        *([n, meaning, *(x.get(n, "") for x in allowed)] for n, meaning in meanings.items()),
        *rules_of(variants),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def names_table(module: str) -> str:
    """What each public name is, by the first sentence of its docstring."""
    part = import_module(f"ascend_attn_ops.{module}")
    rows = []
    for name in (x for x in part.__all__ if not x.startswith("_")):
        summary = (inspect.getdoc(getattr(part, name)) or "").partition("\n\n")[0]
        summary = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", summary.replace("\n", " "))
        rows.append(f"| `{name}` | {summary.replace('``', '`').removesuffix('.')} |\n")
    return "".join(["| | |\n| --- | --- |\n", *rows])


def with_tables(page: str) -> str:
    of_operator = {row["operator"]: row["devices"] for row in table()}

    def written(place: re.Match[str]) -> str:
        begin, kind, name, end = place.groups()
        text = limits_table(of_operator[name]) if kind == "limits" else names_table(name)
        return f"{begin}{text}{end}"

    return PLACE.sub(written, page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
