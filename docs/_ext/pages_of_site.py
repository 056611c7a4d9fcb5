"""Adds what the site has and the files, which are read on the repository's host, have not.

These are the navigation, and the docstrings of the public names, on the page python.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import ascend_attn_ops
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

NAVIGATION = {
    "Start": "install first_steps adopting hardware simulation",
    "Operators": "operators/index operators/sequences operators/*",
    "Guides": "nn sparse_modes tutorials/* graphs",
    "Reference": "python errors device numerics performance environment glossary design",
    "\N{CJK UNIFIED IDEOGRAPH-4E2D}\N{CJK UNIFIED IDEOGRAPH-6587}": "zh/index zh/*",
}
MODULES = ("ops", "nn", "debug", "flash_attn", "torch_npu", "distributed", "transformers")
# Public functions return these or lead to them.
OTHERS = {
    "nn": ("latent_attention.LatentInputs", "lightning_indexer.IndexerProjections",
           "quantization.QuantizedAttentionInputs", "paged_cache.Step", "paged_cache.LayerPages"),
    "flash_attn": ("bert_padding.unpad_input", "bert_padding.pad_input",
                   "bert_padding.index_first_axis", "layers.rotary.apply_rotary_emb",
                   "layers.rotary.RotaryEmbedding"),
}  # fmt: skip


def _item(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _paths(module: str) -> Iterator[str]:
    part = f"ascend_attn_ops.{module}"
    for name in (x for x in import_module(part).__all__ if not x.startswith("_")):
        is_at_the_top = module in ("ops", "nn", "debug") and hasattr(ascend_attn_ops, name)
        yield f"ascend_attn_ops.{name}" if is_at_the_top else f"{part}.{name}"
    yield from (f"{part}.{x}" for x in OTHERS.get(module, ()))


def _entry(path: str) -> str:
    item = _item(path)
    if not inspect.isclass(item):
        return f".. autofunction:: {path}\n"
    ours = [x for x in item.__mro__ if x.__module__.startswith("ascend_attn_ops.")]
    named = {name: x for base in reversed(ours) for name, x in vars(base).items()}
    methods = [x for x in named if not x.startswith("_") and inspect.isroutine(named[x])]
    shown = f":members: {', '.join(methods)}" if methods else ":no-members:"
    return f".. autoclass:: {path}\n   {shown}\n"


def _navigation() -> Iterator[str]:
    for caption, pages in NAVIGATION.items():
        lines = "\n".join(pages.split())
        yield f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{lines}\n```\n"


def _docstrings() -> Iterator[str]:
    for module in MODULES:
        where = "" if module in ("ops", "nn", "debug") else f".{module}"
        entries = "\n".join(map(_entry, _paths(module)))
        yield f"\n## Reference of `{module}`\n\n```{{eval-rst}}\n"
        yield f".. currentmodule:: ascend_attn_ops{where}\n\n{entries}```\n"


def _without_links_outside(app: Sphinx, page: str, text: str) -> str:
    """The site has no page of README and the like."""
    folder = (Path(app.srcdir) / page).parent

    def shown(link: re.Match[str]) -> str:
        label, path = link.groups()
        is_outside = not (folder / path).resolve().is_relative_to(Path(app.srcdir).resolve())
        return label if is_outside else link[0]

    return re.sub(r"\[([^\]\n]*)\]\((\.\./[^)#\s]*)[^)\s]*\)", shown, text)


def _add(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = _without_links_outside(app, page, source[0])
    added = {"index": _navigation, "python": _docstrings}
    source[0] += "".join(added[page]()) if page in added else ""


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("source-read", _add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
