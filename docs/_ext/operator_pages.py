"""Writes docs/operators/: one page per operator, and their index.

The operators, their schemas and their limits come from the package, the docstring through autodoc.
The prose comes from docs/specification. The specification of an operator is split at its headings
and becomes part of the operator's page; Sphinx builds no page of its own for it. Marks enclose the
parts that the pages need by name:

    % begin formula(lightning_indexer)
    ...
    % end formula(lightning_indexer)

Every operator has `formula`, `shapes` and, if it has a sparse_mode, `masks`. A gradient is written
in the specification of its forward, but its marked parts go to its own page. device.md may have
`device`. A new operator has a page as soon as it has a specification; without one the build fails
and says what is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ascend_attn_ops
import torch
from ascend_attn_ops._core.device_limits import table
from docstrings import example_of
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.typing import ExtensionMetadata

Row = dict[str, Any]  # of ascend_attn_ops._core.device_limits.table()


def specification_of(operator: str, folder: Path) -> Path:
    """The specification of an operator; a gradient stands on the page of its forward."""
    stem = operator.removesuffix("_")
    for name in (stem, stem.removesuffix("_grad")):
        page = folder / f"{name}.md"
        if page.exists():
            return page
    raise ExtensionError(f"{operator} has no specification: expected docs/specification/{stem}.md")


ON_THE_DEVICE = "On the device"
MARKED = re.compile(r"^% begin (\w+)\((\w+)\)\n(.*?)^% end \1\(\2\)\n", re.M | re.S)


def marked(kind: str, operator: str, page: Path) -> str:
    """Returns the text between two marks; the build fails if they are missing."""
    for match in MARKED.finditer(page.read_text(encoding="utf-8")):
        if match.group(1, 2) == (kind, operator):
            return match[3].strip()
    marks = f"'% begin {kind}({operator})' ... '% end {kind}({operator})'"
    raise ExtensionError(f"docs/specification/{page.name}: expected {marks}")


def sections(operator: str, page: Path) -> dict[str, str]:
    """Returns the text by heading; a link replaces the parts of another operator's page."""

    def here(match: re.Match[str]) -> str:
        kind, other, body = match.groups()
        if other == operator:
            return str(body)
        link = f"[`{other}`]({other}.md) has the formula and the shapes.\n"
        return link if kind == "formula" else ""

    text = MARKED.sub(here, page.read_text(encoding="utf-8").partition("\n")[2])
    introduction, *rest = re.split(r"^## (.*)\n", text, flags=re.M)
    bodies = [body.strip() for body in rest[1::2]]
    return {"": introduction.strip(), **dict(zip(rest[::2], bodies, strict=True))}


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


def limits(row: Row) -> list[str]:
    return [
        "## Limits by product",
        f"On an NPU this operator is {', '.join(aclnn_functions(row))} of CANN.",
        limits_table(row),
        "A quantity without a row has no limit of its own. A device without a column does not "
        "have the function: a call that is checked for it is an error.",
    ]


def example(operator: str) -> list[str]:
    return ["## Example", f"```{{doctest}}\n{example_of(operator)}\n```"]


def forward_sections(row: Row, page: Path) -> list[str]:
    """Returns the specification, with the example and the limits after the shapes."""
    operator = row["operator"]
    for kind in ("formula", "shapes"):
        marked(kind, operator, page)
    text = sections(operator, page)
    text.pop(ON_THE_DEVICE, None)
    introduction, formula = text.pop(""), text.pop("Formula")
    shapes = next(heading for heading in text if heading.endswith(("hapes", "heads")))
    parts = ["## Formula", introduction, formula, f"## {shapes}", text.pop(shapes)]
    parts += [*example(operator), *limits(row)]
    for heading, body in text.items():
        parts += [f"## {heading}", body]
    return parts


def gradient_sections(row: Row, page: Path) -> list[str]:
    operator = row["operator"]
    forward = page.stem
    parts = [
        f"This is the backward of [`{forward}`]({forward}.md), whose page has the rules of both.",
        "## Formula",
        marked("formula", operator, page),
        "## Shapes",
        marked("shapes", operator, page),
        *example(operator),
        *limits(row),
    ]
    if any(argument.name == "sparse_mode" for argument in schema_of(operator).arguments):
        parts += ["## Which keys are kept", marked("masks", operator, page)]
    return parts


def device_section(operator: str, page: Path) -> list[str]:
    """Collects the notes about the device, from the specification and from device.md."""
    is_forward = page.stem == operator.removesuffix("_")
    own = sections(operator, page).get(ON_THE_DEVICE) if is_forward else None
    parts = [own] if own else []
    device = page.with_name("device.md")
    if f"% begin device({operator})" in device.read_text(encoding="utf-8"):
        origin = "[Read from CANN's sources, not run on a device](../specification/device.md):"
        parts += [origin, marked("device", operator, device)]
    return parts


def operator_page(row: Row, specifications: Path) -> str:
    operator = row["operator"]
    page = specification_of(operator, specifications)
    parts = [
        f"# {operator}",
        f"```{{eval-rst}}\n.. autofunction:: ascend_attn_ops.{operator}\n```",
    ]
    if page.stem == operator.removesuffix("_"):
        parts += forward_sections(row, page)
    else:
        parts += gradient_sections(row, page)
    on_the_device = device_section(operator, page)
    if on_the_device:
        parts += ["## What the device does", *on_the_device]
    parts += [
        "## Schema",
        f"```text\ntorch.ops.ascend.{wrapped_schema(operator)}\n```",
        *out_overload(operator),
        "## Errors",
        f"An error is one line that begins with `ascend::{operator}:`. It is raised before "
        "anything is written, and is the same on the CPU and on the NPU: see [Limits and "
        "errors](../errors.md).",
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
