"""Prepares docstrings for autodoc.

`Raises: As :func:...` is a sentence, which napoleon would take for the name of an exception. The
page of an operator has its formula and its example in sections of their own.
"""

from __future__ import annotations

import inspect
import re
from itertools import pairwise

import ascend_attn_ops
from ascend_attn_ops._core.device_limits import table
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

# A section of prose: conf.py, napoleon_custom_sections.
_PROSE = "Errors:"


def _sentences_are_prose(
    app: Sphinx, kind: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    for at, (title, first) in enumerate(pairwise(lines)):
        if title == "Raises:" and first.lstrip().startswith("As "):
            lines[at] = _PROSE


def _without(text: str, title: str) -> tuple[str, str]:
    """Splits a section of a docstring from the rest."""
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", text + "\n", re.M)
    return (text.replace(match[0].rstrip("\n"), ""), match[1]) if match else (text, "")


def example_of(operator: str) -> str:
    text = inspect.getdoc(getattr(ascend_attn_ops, operator)) or ""
    return inspect.cleandoc(_without(text, "Example")[1])


def without_formula(text: str) -> str:
    """Drops literal blocks of formulas, with the sentences that lead to them.

    A block of Python, which has attributes, stays.
    """
    paragraphs = text.split("\n\n")
    kept: list[str] = []
    for paragraph in paragraphs:
        if kept and kept[-1].endswith("::") and not re.search(r"\w\.\w", paragraph):
            sentences = re.split(r"(?<=\.)\s", kept.pop())[:-1]
            kept += [" ".join(sentences)] if sentences else []
        else:
            kept.append(paragraph)
    return "\n\n".join(kept)


def _sections_are_elsewhere(
    app: Sphinx, kind: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    if name.removeprefix("ascend_attn_ops.") in {row["operator"] for row in table()}:
        text = without_formula(_without("\n".join(lines), "Example")[0])
        lines[:] = text.split("\n")


def setup(app: Sphinx) -> ExtensionMetadata:
    # Before napoleon, which listens at the default priority of 500.
    app.connect("autodoc-process-docstring", _sentences_are_prose, priority=400)
    app.connect("autodoc-process-docstring", _sections_are_elsewhere, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
