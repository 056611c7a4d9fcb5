"""Prepares docstrings for autodoc.

`Raises: As :func:...` is a sentence, which napoleon would take for the name of an exception.
"""

from __future__ import annotations

from itertools import pairwise

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


def setup(app: Sphinx) -> ExtensionMetadata:
    # Before napoleon, which listens at the default priority of 500.
    app.connect("autodoc-process-docstring", _sentences_are_prose, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
