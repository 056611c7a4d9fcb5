"""Files for the site that hosts a public repository: workflows, issue forms, the citation."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ascend_attn_ops
import pytest
from support.checkout import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FORMS = [x for x in sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) if x.stem != "config"]

pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="not in a checkout")


def load(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def commands() -> list[tuple[str, str]]:
    return [
        (file.stem, step["run"])
        for file in WORKFLOWS
        for job in load(file)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]


def test_there_are_all_workflows() -> None:
    assert [x.stem for x in WORKFLOWS] == ["docs", "fuzz", "lint", "test", "wheels"]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(("workflow", "command"), commands(), ids=lambda x: x)
def test_a_workflow_runs_what_the_makefile_has(workflow: str, command: str) -> None:
    target, *variables = re.sub(r"\$\{\{.+?\}\}", "1", command).removeprefix("make ").split()
    makefile = (ROOT / "Makefile").read_text()
    for name in (x.partition("=")[0] for x in variables):
        assert re.search(rf"\$\((or \$\()?{name}\)|,\$\({name}\)", makefile), name
    dry = ["make", "--dry-run", "--no-print-directory", target, *variables]
    subprocess.run(dry, cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda x: x.stem)
def test_a_workflow_reads_only_and_ends(file: Path) -> None:
    workflow = load(file)
    assert workflow["permissions"] == {"contents": "read"}
    # YAML reads the key `on` as a boolean.
    assert workflow[True]
    # Without it, pip would install torch's builds for CUDA.
    assert workflow["env"]["PIP_EXTRA_INDEX_URL"] == "${{ vars.TORCH_CPU_INDEX }}"
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        matrix = job.get("strategy", {}).get("matrix", {})
        used = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job)))
        assert used == matrix.keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))


@pytest.mark.parametrize("file", FORMS, ids=lambda x: x.stem)
def test_an_issue_form(file: Path) -> None:
    form = load(file)
    assert form.keys() >= {"name", "description", "body"}
    inputs = [x for x in form["body"] if x["type"] != "markdown"]
    assert any(x.get("validations", {}).get("required") for x in inputs)
    names = [x["id"] for x in inputs]
    assert len(names) == len(set(names))
    for command in re.findall(r"`python -m ascend_attn_ops (\w+)", file.read_text()):
        assert command in ("report", "check")


def test_the_citation_is_of_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == ascend_attn_ops.__version__
    assert citation["title"] == "ascend_attn_ops"
    assert citation["authors"]
