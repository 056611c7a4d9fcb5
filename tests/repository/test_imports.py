"""`import ascend_attn_ops` loads little, and everything works with nothing else imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ascend_attn_ops
import pytest
from support import fresh
from support.checkout import ROOT

PACKAGE = Path(ascend_attn_ops.__file__).parent
# Each takes longer to import than the package may.
FORBIDDEN = ("numpy", "sympy", "torch._dynamo", "torch._inductor", "transformers")


def output_of(code: str) -> list[str]:
    ran = fresh.run(code)
    assert ran.status == 0, ran.err
    return ran.out.split()


def test_the_import_loads_few_modules() -> None:
    code = "import sys, torch; before = set(sys.modules); import ascend_attn_ops; "
    # A true start: the server of forks has more than torch.
    command = [sys.executable, "-c", code + "print(*set(sys.modules) - before)"]
    loaded = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(FORBIDDEN)]
    # Ours, and torch.utils.flop_counter with what it imports.
    assert len(loaded) <= 20, sorted(loaded)
    assert sum(not name.startswith("ascend_attn_ops") for name in loaded) <= 4, sorted(loaded)


def test_public_names_and_modules_are_there_when_used() -> None:
    assert set(ascend_attn_ops.__all__) <= set(dir(ascend_attn_ops))
    for name in ascend_attn_ops.__all__:
        assert getattr(ascend_attn_ops, name).__name__ == name
    code = "import ascend_attn_ops as ops; print(ops.flash_attn.__name__, ops.limits.__name__)"
    assert output_of(code) == ["ascend_attn_ops.flash_attn", "limits"]
    with pytest.raises(AttributeError, match="'ascend_attn_ops' has no attribute 'flash_attntion'"):
        ascend_attn_ops.flash_attntion  # type: ignore[attr-defined]  # noqa: B018


USES = {
    "flops": "with torch.utils.flop_counter.FlopCounterMode(display=False) as mode: f(x)\n"
    "print(mode.get_total_flops() > 0)",
    "vmap": "print(torch.func.vmap(torch.func.grad(f))(x[None]).shape == x[None].shape)",
    "compile": "print(torch.equal(torch.compile(f, backend='eager', fullgraph=True)(x), f(x)))",
    "compile, a function that is imported meanwhile": "def g(x):\n"
    "    out = ascend_attn_ops.flash_attention_score(x, x, x, num_heads=2, layout='BSND')\n"
    "    return out[0].sum()\n"
    "compiled = torch.compile(g, backend='eager', fullgraph=True)\n"
    "print(torch.equal(compiled(x), g(x)))",
    "export": "class M(torch.nn.Module):\n"
    "    def forward(self, x): return f(x)\n"
    "print(torch.equal(torch.export.export(M(), (x,)).module()(x), f(x)))",
}


@pytest.mark.parametrize("use", USES)
def test_torch_finds_what_it_needs_of_operators(use: str) -> None:
    """With the package imported, and none of its functions used."""
    code = (
        "import torch, torch.utils.flop_counter, ascend_attn_ops\n"
        "def f(x):\n"
        "    attention = torch.ops.ascend.flash_attention_score\n"
        "    return attention(x, x, x, num_heads=2, layout='BSND', scale_value=0.5)[0].sum()\n"
        "x = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16)\n"
    )
    assert output_of(code + USES[use]) == ["True"]


def private_parts(source: str, package: str) -> Iterator[str]:
    """Yields names with an underscore that a module imports or reads from a package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            # Operators, whose names are those of their schemas, are no part of a module.
            if (
                first == package
                and rest[:1] != ["ops"]
                and any(re.match("_[a-zA-Z]", part) for part in rest)
            ):
                yield name


@pytest.mark.parametrize("package", ["torch", "torch_npu"])
def test_private_parts_are_imported_in_one_module(package: str) -> None:
    found = {
        str(file.relative_to(PACKAGE)): names
        for file in PACKAGE.rglob("*.py")
        if (names := list(private_parts(file.read_text(), package)))
    }
    assert found.keys() == {f"_core/{package}_private.py"}, found


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """pytest imports them by their name alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
