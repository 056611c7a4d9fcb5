"""Writes docs/operators/: one page per operator, and their index.

The operators, their schemas and their limits come from the package, the docstring through autodoc.
The prose comes from docs/specification, where what belongs on an operator's page is marked

    % begin formula(lightning_indexer)
    ...
    % end formula(lightning_indexer)

The operator's specification has `formula`, `shapes` and, where there is a sparse_mode, `masks`;
device.md may have `device`. A new operator has a page as soon as it has a specification, and
without one the build fails and says what is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ascend_attn_ops
import torch
from ascend_attn_ops.device_limits import table
from docstrings import example_of
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.typing import ExtensionMetadata

Row = dict[str, Any]  # of ascend_attn_ops.device_limits.table()


def specification_of(operator: str, folder: Path) -> Path:
    """The specification of an operator; a gradient stands on the page of its forward."""
    stem = operator.removesuffix("_")
    for name in (stem, stem.removesuffix("_grad")):
        page = folder / f"{name}.md"
        if page.exists():
            return page
    raise ExtensionError(f"{operator} has no specification: expected docs/specification/{stem}.md")


def included(heading: str, section: str, operator: str, page: Path) -> list[str]:
    """A section of a specification, under a heading; the build fails where it is not there."""
    text = page.read_text(encoding="utf-8")
    begin, end = (f"% {edge} {section}({operator})" for edge in ("begin", "end"))
    if not 0 <= text.find(begin) < text.find(end):
        raise ExtensionError(f"docs/specification/{page.name}: expected '{begin}' ... '{end}'")
    options = f":start-after: '{begin}'\n:end-before: '{end}'"
    return [f"## {heading}", f"```{{include}} ../specification/{page.name}\n{options}\n```"]


def schema_of(operator: str) -> Any:
    return getattr(torch.ops.ascend, operator).default._schema


def wrapped_schema(operator: str) -> str:
    """The schema with one argument a line."""
    head, rest = str(schema_of(operator)).removeprefix("ascend::").split("(", 1)
    arguments, results = rest.split(") -> ")
    # A comma between brackets separates the elements of a default.
    lines = re.split(r", (?![^\[]*\])", arguments)
    return "\n".join([f"{head}(", *(f"    {line}," for line in lines), f") -> {results}"])


def out_overload(operator: str) -> list[str]:
    """Whether the results can be written to tensors of the caller."""
    if not schema_of(operator).returns:
        return []
    if "out" in getattr(torch.ops.ascend, operator).overloads():
        return ["Its [`out=` overload](../python.md#out-overloads) writes to tensors of yours."]
    return ["It has no `out=` overload, because autograd keeps what it returns."]


def aclnn_functions(row: Row) -> list[str]:
    return [f"`{name}`" for name in row["aclnn"]]


def limits_table(row: Row) -> str:
    """Quantities down, devices across; devices that accept the same share a column."""
    columns: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {}
    for (product, cann), limits in row["devices"].items():
        _, versions = columns.setdefault(repr(limits), (limits, {}))
        versions.setdefault(product, []).append(cann)
    variants = [limits for limits, _ in columns.values()]
    all_versions = {cann for _, cann in row["devices"]}
    headings = [
        ", ".join(
            product
            if set(of_product) == all_versions
            else f"{product} (CANN {', '.join(of_product)})"
            for product, of_product in versions.items()
        )
        for _, versions in columns.values()
    ]
    meanings = {name: meaning for v in variants for name, meaning, _ in v["limits"]}
    allowed = [{name: text for name, _, text in v["limits"]} for v in variants]
    rules = dict.fromkeys(tuple(rule) for v in variants for rule in v["rules"])
    lines = [
        ["", "", *headings],
        ["---"] * (2 + len(variants)),
        ["dtypes", "", *(", ".join(v["dtypes"]) for v in variants)],
        *(
            [name, meaning, *(a.get(name, "") for a in allowed)]
            for name, meaning in meanings.items()
        ),
        *(
            [f"`{rule[0]}`", rule[1], *("yes" if rule in v["rules"] else "" for v in variants)]
            for rule in rules
        ),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def operator_page(row: Row, specifications: Path) -> str:
    operator = row["operator"]
    page = specification_of(operator, specifications)
    device = specifications / "device.md"
    parts = [
        f"# {operator}",
        f"```{{eval-rst}}\n.. autofunction:: ascend_attn_ops.{operator}\n```",
        *included("Formula", "formula", operator, page),
        *included("Shapes and dtypes", "shapes", operator, page),
        "## Example",
        f"```{{doctest}}\n{example_of(operator)}\n```",
        "## Limits by product",
        f"On an NPU this operator is {', '.join(aclnn_functions(row))} of CANN.",
        limits_table(row),
        "A quantity without a row has no limit of its own. A device without a column does not "
        "have the function: a call that is checked for it is an error.",
    ]
    if any(argument.name == "sparse_mode" for argument in schema_of(operator).arguments):
        parts += included("Visible keys", "masks", operator, page)
        parts.append("[Sparse modes](../sparse_modes.md) draws every mode.")
    if f"% begin device({operator})" in device.read_text(encoding="utf-8"):
        heading, *section = included("What the device does", "device", operator, device)
        origin = "[Read from CANN's sources, not run on a device](../specification/device.md):"
        parts += [heading, origin, *section]
    parts += [
        "## Schema",
        f"```text\ntorch.ops.ascend.{wrapped_schema(operator)}\n```",
        *out_overload(operator),
        "## Errors",
        f"An error is one line that begins with `ascend::{operator}:`. It is raised before "
        "anything is written, and is the same on the CPU and on the NPU: see [Limits and "
        f"errors](../errors.md). [The specification](../specification/{page.name}) has every rule "
        "and its reason.",
    ]
    return "\n\n".join(parts) + "\n"


def index_page(rows: list[Row]) -> str:
    lines = ["# Operators", "", "| operator | | NPU |", "|---|---|---|"]
    for row in rows:
        operator = row["operator"]
        summary = (getattr(ascend_attn_ops, operator).__doc__ or "").strip().splitlines()[0]
        summary = re.sub(r":\w+:`(\w+)`", r"`\1`", summary)
        functions = "<br>".join(aclnn_functions(row))
        lines.append(f"| [`{operator}`]({operator}.md) | {summary} | {functions} |")
    entries = "\n".join(row["operator"] for row in rows)
    return "\n".join([*lines, "", f"```{{toctree}}\n:hidden:\n\n{entries}\n```", ""])


def _write_pages(app: Sphinx) -> None:
    specifications = Path(app.srcdir) / "specification"
    folder = Path(app.srcdir) / "operators"
    rows = sorted(table(), key=lambda row: row["operator"])
    pages = {f"{row['operator']}.md": operator_page(row, specifications) for row in rows}
    pages["index.md"] = index_page(rows)
    folder.mkdir(exist_ok=True)
    for stale in set(folder.glob("*.md")) - {folder / name for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        page = folder / name
        # An unchanged page keeps its time, and is not read again.
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("builder-inited", _write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
