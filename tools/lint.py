"""Checks the files that no other linter knows: prose, workflows, translations. `make lint` runs it.

The GitHub workflows must run commands that the Makefile has, and a Chinese page must have the code
of its English page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs/_ext"))

import english  # noqa: E402
import translations  # noqa: E402

FENCE = re.compile(r"^```[^\n]*\n.*?^```$", re.M | re.S)


def text_of(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def workflows() -> Iterator[str]:
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    if [x.stem for x in files] != ["docs", "lint", "nightly", "test", "wheels"]:
        yield "expected the workflows docs, lint, nightly, test and wheels"
    for file in files:
        workflow: dict[Any, Any] = yaml.safe_load(text_of(file))
        if workflow["permissions"] != {"contents": "read"}:
            yield f"{file}: expected permissions to read alone"
        # Without it, pip would install torch's builds for CUDA.
        if workflow["env"].get("PIP_EXTRA_INDEX_URL") != "${{ vars.TORCH_CPU_INDEX }}":
            yield f"{file}: expected PIP_EXTRA_INDEX_URL"
        for name, job in workflow["jobs"].items():
            if not 0 < job.get("timeout-minutes", 0) <= 360:
                yield f"{file}: {name}: expected timeout-minutes of at most 360"
            matrix = job.get("strategy", {}).get("matrix", {}).keys()
            if set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job))) != matrix:
                yield f"{file}: {name}: expected steps to use the axes {list(matrix)}"
            for step in job["steps"]:
                if not re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1")):
                    yield f"{file}: {name}: expected a version of an action, got {step['uses']}"
                if "run" in step:
                    yield from (f"{file}: {x}" for x in wrong_command(step["run"]))


def wrong_command(command: str) -> Iterator[str]:
    """Dry runs a command of a workflow, whose variables the Makefile must read."""
    words = re.sub(r"\$\{\{.+?\}\}", "1", command).split()
    for name in (x.partition("=")[0] for x in words if "=" in x):
        if not re.search(rf"\$\((or \$\()?{name}\)|,\$\({name}\)", text_of("Makefile")):
            yield f"{command}: the Makefile does not read {name}"
    dry = [words[0], "--dry-run", *words[1:]]
    if words[0] != "make" or subprocess.run(dry, cwd=ROOT, capture_output=True).returncode:
        yield f"{command}: expected a target of the Makefile"


def issue_forms() -> Iterator[str]:
    for file in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(text_of(file))
        if file.stem == "config":
            continue
        inputs = [x for x in form["body"] if x["type"] != "markdown"]
        if not any(x.get("validations", {}).get("required") for x in inputs):
            yield f"{file}: expected an input that is required"
        if len({x["id"] for x in inputs}) < len(inputs) or not form["name"] + form["description"]:
            yield f"{file}: expected a name, a description and inputs with ids of their own"
        for command in re.findall(r"`python -m (\w+(?: \w+)?)", text_of(file)):
            if command not in ("ascend_attn_ops report", "ascend_attn_check"):
                yield f"{file}: expected the report or the check, got {command}"


def citation() -> Iterator[str]:
    cited = yaml.safe_load(text_of("CITATION.cff"))
    if f'__version__ = "{cited["version"]}"' not in text_of("python/ascend_attn_ops/__init__.py"):
        yield f"CITATION.cff: expected the version of the package, got {cited['version']}"


def chinese_pages() -> Iterator[str]:
    for page in translations.translations():
        source = translations.english_of(page)
        if FENCE.findall(text_of(page)) != FENCE.findall(text_of(source)):
            yield f"{page}: expected the code of {source}"
        if f"]({translations.link_to_english(page)})" not in text_of(page):
            yield f"{page}: expected a link to {source}"
    for name, other in (("README.md", "README.zh.md"), ("README.zh.md", "README.md")):
        if f"({other})" not in text_of(name).partition("\n")[0]:
            yield f"{name}: expected a link to {other} in the first line"


def main() -> int:
    checks = (workflows, issue_forms, citation, chinese_pages)
    found = [finding for check in checks for finding in check()]
    print(*found, sep="\n", end="\n" if found else "")
    return max(english.main(), int(bool(found)))


if __name__ == "__main__":
    sys.exit(main())
