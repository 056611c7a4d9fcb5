"""`python -m ascend_attn_ops check` on the simulated device: nothing differs, and a line notices
each planted fault. This proves the check, and says nothing of a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import cann_simulator
import pytest
from ascend_attn_ops.check import results
from ascend_attn_ops.check.known_facts import FACTS
from check_faults import FATAL, FAULTS, WITHOUT_LINE
from conftest import once, run_in_new_process
from support.checkout import ROOT

pytestmark = once

SCRIPT = Path(__file__).with_name("check_faults.py")
PRODUCTS = ("A2", "A3", "950", "310P")
LEAST = {"A2": 60, "A3": 60, "950": 50, "310P": 12}

each_product = pytest.mark.parametrize("product", PRODUCTS)


def environment(product: str, cann: str = "9.1", **options: Any) -> dict[str, str]:
    simulated = cann_simulator.environment(product=product, cann=cann, task_queue=0, **options)
    return {**os.environ, **simulated, "PYTHONPATH": os.pathsep.join(sys.path)}


def run(*arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True,
        check=False, timeout=550,
    )  # fmt: skip


@cache
def survey(product: str) -> dict[str, Any]:
    ran = run(SCRIPT, env=environment(product))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@each_product
def test_enough_faults_are_noticed(product: str) -> None:
    noticed = [x for x in survey(product).values() if x and x[1] == "differs"]
    assert len(noticed) >= LEAST[product]


# The product varies last, so that a process of pytest surveys few of them.
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@each_product
def test_a_line_notices_the_fault(product: str, fault: Any) -> None:
    found = survey(product)
    if fault.name not in found:
        pytest.skip(f"Ascend {product} launches no {fault.function}")
    if found[fault.name] is None:
        reasons = WITHOUT_LINE[product].items()
        (reason,) = (why for lines, why in reasons if fnmatchcase(fault.line, lines))
        pytest.skip(f"no line of Ascend {product} passes without the fault: {reason}")
    line, verdict, text = found[fault.name]
    assert verdict == "differs", (line, text)


@pytest.mark.parametrize("name", FATAL)
def test_a_crash_and_a_hang_of_the_device_are_lines(name: str) -> None:
    ran = run(SCRIPT, name, env=environment("A2"))
    assert ran.returncode == 0, ran.stderr
    _, verdict, text = json.loads(ran.stdout.splitlines()[-1])
    assert verdict == "differs"
    assert text.startswith(("the process has ended, ", "")[name == "hang"])
    assert FATAL[name][1] in text


def check(folder: Path, env: dict[str, str], *arguments: object) -> tuple[int, dict[str, Any]]:
    report = folder / "report.json"
    ran = run("-m", "ascend_attn_ops", "check", "--json", report, *arguments, env=env)
    assert report.exists(), ran.stderr
    found = {x.id: x for x in results.read(report)[1]}
    return ran.returncode, found


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    env = environment("A2", without=["aclnnSparseFlashAttention"])
    status, found = check(tmp_path, env, "--only", "environment")
    assert status == 1
    differing = [x.text for x in found.values() if x.verdict == "differs"]
    text = "aclnnSparseFlashAttention, which sparse_flash_attention calls, is not in this CANN"
    assert differing == [text]


DEVICES = [
    ("A2", "9.1"), ("A3", "9.1"), ("950", "9.1"), ("310P", "9.1"), ("A2", "9.0"), ("A2", "8.5"),
]  # fmt: skip


@pytest.mark.parametrize(("product", "cann"), DEVICES)
def test_the_simulated_device_passes(product: str, cann: str, tmp_path: Path) -> None:
    status, found = check(
        tmp_path, environment(product, cann), "--quick", "--only", "environment", "numbers",
        "limits", "host code", "behaviour", "speed",
    )  # fmt: skip
    assert [x for x in found.values() if x.verdict == "differs"] == []
    assert status == 0
    refused = [x for x in found.values() if x.verdict in ("refused", "skipped")]
    assert all(x.text for x in refused)
    text = (tmp_path / "report.json").read_text()
    assert str(ROOT) not in text
    assert str(tmp_path) not in text


def test_a_limit_of_values_refuses_a_sample(tmp_path: Path) -> None:
    sample = "lightning_indexer_grad-BSND-B2-S6x20-L5+6x17+9-H64-D128-K14-mode0-bfloat16"
    status, found = check(tmp_path, environment("A2"), "--only", f"numbers/{sample}")
    assert status == 0
    (line,) = found.values()
    assert line.verdict == "refused"
    assert "expected at least K keys in every sequence" in line.text


def test_distributed_operators_equal_those_of_one_device(tmp_path: Path) -> None:
    status, found = check(tmp_path, environment("A2"), "--only", "communication")
    assert status == 0
    assert len(found) == 6
    assert {x.verdict for x in found.values()} == {"pass"}
    # The section names the operators that a product lacks.
    status, found = check(
        tmp_path, environment("310P"), "--only", "communication/sparse_flash_attention"
    )
    assert status == 0
    (line,) = found.values()
    assert line.verdict == "refused"
    assert "Ascend 310P" in line.text


def test_a_cann_that_updates_no_graphs_is_named() -> None:
    output, _ = run_in_new_process(
        """
        import torch_npu
        from ascend_attn_ops.check import behaviour, child
        from ascend_attn_ops.check.probe import Context

        def missing(stream):
            raise RuntimeError("Failed to find function aclmdlRICaptureTaskGrpBegin")

        torch_npu.npu.graphs.graph_task_group_begin = missing
        context = Context("npu:0")
        probes = {x.name: x for x in behaviour.probes(context)}
        found = child.run(probes["graph-lengths-flash_attention_score"], context)
        print(found.verdict, found.text)
    """,
        **environment("A2"),
    )
    assert output.startswith(
        "skipped this CANN captures no such graph: Failed to find function acl"
    )


# At a level with a queue, a probe whose call fails must not leave a stopped queue to the next.
@pytest.mark.parametrize(("product", "cann", "level"), [("A2", "9.1", 1), ("950", "9.1", 0)])
def test_the_facts_hold(product: str, cann: str, level: int, tmp_path: Path) -> None:
    """The dangerous ones are named, and not run."""
    env = {**environment(product, cann), "TASK_QUEUE_ENABLE": str(level)}
    status, found = check(tmp_path, env, "--only", "known facts")
    assert [x for x in found.values() if x.verdict == "differs"] == []
    assert status == 0
    if product == "A2":
        # Statements without a probe have groups of their own.
        facts = [x for x in found.values() if not x.group.endswith(", not probed")]
        not_probed = [x.id for x in facts if x.text.startswith("not probed: ")]
        dangerous = [fact.id for fact in FACTS if fact.danger and cann in fact.releases]
        assert not_probed == [f"known facts/{name}" for name in dangerous]
        # The simulated device raises an error for these.
        notes = [x.id for x in found.values() if x.verdict == "note"]
        assert notes == [
            f"known facts/{name}" for name in ("sfag-lengths", "fa-mask-beside-tokens")
        ]


@pytest.mark.parametrize("cann", ["9.0", "9.1"])
def test_the_dangerous_facts_hold(cann: str, tmp_path: Path) -> None:
    facts = [fact for fact in FACTS if fact.danger and cann in fact.releases]
    dangerous = [f"known facts/{fact.id}" for fact in facts]
    arguments = ("--dangerous", "--only", *dangerous)
    status, found = check(tmp_path, environment("A2", cann), *arguments)
    assert status == 0
    assert {x.id: x.verdict for x in found.values()} == dict.fromkeys(dangerous, "pass")


def test_the_page_has_the_faults() -> None:
    """docs/hardware.md shows which line notices what."""
    page = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("% begin check faults\n")
    table, _, _ = rest.partition("% end check faults")
    rows = [f"| {fault.name} | `{fault.function}` | `{fault.line}` |" for fault in FAULTS]
    rows += [f"| {name} | any | the probe that runs |" for name in FATAL]
    assert [line for line in table.splitlines() if line.startswith("| ")][1:] == rows
    for product, reasons in WITHOUT_LINE.items():
        for lines, why in reasons.items():
            assert f"| {product} | `{lines}` | {why} |" in page
