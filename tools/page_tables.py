"""Writes the tables of the documentation that the package knows: limits by product, and names.

    python tools/page_tables.py

A table stands between two comments of a page, which do not show:

    <!-- limits: NAME OF AN OPERATOR -->      <!-- names: NAME OF A MODULE -->
    <!-- limits end -->                       <!-- names end -->

and so do the products of all operators, `<!-- products: all -->`.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ascend_attn_ops._core.device_limits import table

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- (limits|names|products): (\w+) -->\n).*?(<!-- \2 end -->)", re.S)
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


Device = tuple[str, str]
Row = tuple[str, str]  # a quantity or an argument, and what its limit is about


def rows_of(accepted: dict[str, Any]) -> dict[Row, str]:
    """The limits of a device."""
    limits = {(name, meaning): POWERS.get(x, x) for name, meaning, x in accepted["limits"]}
    rules = {(f"`{name}`", rule.removesuffix(",")): "required" for name, rule in accepted["rules"]}
    return {("dtype", ""): ", ".join(accepted["dtypes"])} | limits | rules


def limits_table(operator: str, of_operator: dict[str, dict[Device, Any]]) -> str:
    """Quantities down, devices across; devices that accept the same share a column.

    A gradient's table lacks the rows that are its forward's.
    """
    devices = {device: rows_of(x) for device, x in of_operator[operator].items()}
    is_gradient = operator.endswith("_grad")
    forward = of_operator.get(operator.removesuffix("_grad"), {}) if is_gradient else {}
    rows = list(dict.fromkeys(row for x in devices.values() for row in x))
    for row in list(rows):
        if forward and all(
            device in forward and x.get(row) == rows_of(forward[device]).get(row)
            for device, x in devices.items()
        ):
            rows.remove(row)
    columns: dict[tuple[str, ...], list[Device]] = {}
    for device, x in devices.items():
        columns.setdefault(tuple(x.get(row, "") for row in rows), []).append(device)
    # The rules of an argument that the same devices have share a row.
    texts: dict[tuple[str, ...], list[str]] = {}
    for (name, text), *cells in zip(rows, *columns, strict=True):
        texts.setdefault((name, *cells, "" if name.startswith("`") else text), []).append(text)
    lines = [
        ["", "", *(names_of(same, all_versions(of_operator)) for same in columns.values())],
        ["---"] * (2 + len(columns)),
        *([name, "; ".join(found), *cells] for (name, *cells, _), found in texts.items()),
    ]
    rest = "Without the rows that are the forward's:\n\n" if forward else ""
    return rest + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def all_versions(of_operator: dict[str, dict[Device, Any]]) -> set[str]:
    return {cann for devices in of_operator.values() for _, cann in devices}


def products_table(of_operator: dict[str, dict[Device, Any]]) -> str:
    """The versions of CANN with which a product has an operator."""
    versions = all_versions(of_operator)
    products = list(dict.fromkeys(x for devices in of_operator.values() for x, _ in devices))
    lines = [["CANN of", *products], ["---"] * (1 + len(products))]
    for operator, devices in of_operator.items():
        canns = [[cann for x, cann in devices if x == product] for product in products]
        cells = ("all" if set(x) == versions else ", ".join(x) or "none" for x in canns)
        lines.append([f"`{operator}`", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def names_table(module: str) -> str:
    """The public names, with the first sentences of their docstrings."""
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
        if kind == "products":
            text = products_table(of_operator)
        else:
            text = limits_table(name, of_operator) if kind == "limits" else names_table(name)
        return f"{begin}{text}{end}"

    return PLACE.sub(written, page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
