"""Which part of the code may use which.

Tests hold the code and the picture in docs/design.md to these tables: there is no other list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from .checkout import ROOT

CSRC = ROOT / "csrc"
PYTHON = ROOT / "python"


class Part(NamedTuple):
    """A folder of the code: what it is, and what stands below it.

    It may use all that is below: what is named here, and what that may use.
    """

    what: str
    below: tuple[str, ...] = ()


# The folders of csrc: "uses" is "includes".
CSRC_PARTS = {
    "core": Part("vocabulary of the rules: layouts, lengths, limits, errors"),
    "dispatch": Part("from a struct to kernels of the dispatcher", ("core",)),
    "ops": Part("each operator: schema, arguments, rules, outputs", ("dispatch",)),
    "autograd": Part("gradients, autocast", ("ops",)),
    "cpu": Part("CPU kernels", ("ops",)),
    "npu": Part("aclnn launches: _npu", ("ops",)),
    "python": Part("bindings: _C", ("cpu",)),
}

# The folders of the package: "uses" is "imports", when a module loads, later, or for an annotation.
PACKAGE_PARTS = {
    "_core": Part("errors, loading, lengths, pages, masks, device limits"),
    "ops": Part("the public functions, one per operator", ("_core",)),
    "reference": Part("in plain torch", ("_core",)),
    "nn": Part("attention, modules, pages, training, int8", ("ops",)),
    "debug": Part("compare, record, report", ("reference",)),
    "flash_attn": Part("flash-attn's API", ("ops",)),
    "torch_npu": Part("torch_npu's API", ("ops",)),
    "distributed": Part("several ranks", ("nn",)),
    "transformers": Part("enable_dsa, register", ("nn",)),
    "ascend_attn_ops": Part("import ascend_attn_ops", ("nn", "debug")),
}

# The other folders of the checkout. They use csrc and the package, which do not use them.
AROUND = {
    "python/ascend_attn_check": "samples of calls, checks of a device",
    "simulation": "a simulated CANN", "tests": "a folder of each part",
    "tools": "versions, checks of tests", "benchmarks": "every figure of the docs",
    "examples": "training, decoding", "docs": "the site",
}  # fmt: skip


@dataclass(frozen=True)
class Tree:
    folder: Path
    parts: dict[str, Part]
    beside: dict[str, str]  # the parts of the files beside the folders
    used_by: Callable[[Path], Iterator[Path]]  # the files that a file uses

    def files(self) -> list[Path]:
        suffixes = ("cpp", "h", "py", "pyi")
        return sorted(x for suffix in suffixes for x in self.folder.rglob(f"*.{suffix}"))

    def part_of(self, file: Path) -> str:
        folder, _, inside = self.name(file).partition("/")
        part = folder if inside else self.beside[folder]
        assert part in self.parts, f"{file} is of no part in {__file__}"
        return part

    def below(self, part: str) -> set[str]:
        """The parts that a part may use."""
        named = self.parts[part].below
        return set(named).union(*map(self.below, named))

    def name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()


def included(file: Path) -> Iterator[Path]:
    """The headers of csrc that a file of csrc includes."""
    for header in re.findall(r'^#include "(.+)"', file.read_text(), re.M):
        yield from [x for x in (CSRC / header, file.parent / header) if x.is_file()][:1]


def imported(file: Path) -> Iterator[Path]:
    """The modules of ours that a module imports. The package imports none of ascend_attn_check."""
    package = ".".join(file.relative_to(PYTHON).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{module}.{x.name}" for x in node.names]
        for name in names:
            if name.startswith("ascend_attn_"):
                yield module_file(name)


def module_file(name: str) -> Path:
    """Returns the file of a module, or of the module that defines the name."""
    path = PYTHON / name.replace(".", "/")
    for found in (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi")):
        if found.is_file():
            return found
    return module_file(name.rpartition(".")[0])


DOOR = {"_C.pyi": "_core", "__init__.py": "ascend_attn_ops", "__main__.py": "ascend_attn_ops"}
TREES = {
    "csrc": Tree(CSRC, CSRC_PARTS, {"library.cpp": "python"}, included),
    "python": Tree(PYTHON / "ascend_attn_ops", PACKAGE_PARTS, DOOR, imported),
}
