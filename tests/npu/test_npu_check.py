"""`python -m ascend_attn_check` on the simulated device: nothing differs, and a line notices
each planted fault. This proves the check, and says nothing of a device."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import cann_simulator
import pytest
from ascend_attn_check import results
from ascend_attn_check.known_facts import FACTS
from cann_simulator._products import missing_functions
from check_faults import FATAL, FAULTS, PFA, WITHOUT_LINE
from support.checkout import ROOT
from support.simulated_npu import ended, once, run_in_new_process
from support.turns import nightly

pytestmark = once


def environment(product: str, cann: str = "9.1", **options: Any) -> dict[str, str]:
    return cann_simulator.environment(product=product, cann=cann, task_queue=0, **options)


@pytest.mark.parametrize(
    "product", ["A2", *(pytest.param(x, marks=nightly) for x in ("A3", "950", "310P"))]
)
def test_a_line_notices_each_fault(product: str) -> None:
    code = """
        import check_faults, json, torch
        torch.set_num_threads(1)
        print(json.dumps(check_faults.survey()))
    """
    out, _ = run_in_new_process(code, **environment(product))
    found = json.loads(out.splitlines()[-1])
    # None: no such line passes on this product without the fault.
    judged = {name: x for name, x in found.items() if x is not None}
    assert {name: x for name, x in judged.items() if x[1] != "differs"} == {}
    missing = missing_functions(product, "9.1")
    assert judged.keys() == {
        fault.name
        for fault in FAULTS
        if fault.function not in missing
        and not (fault.function == PFA and product == "950")
        and not any(fnmatchcase(fault.line, x) for x in WITHOUT_LINE.get(product, ()))
    }


@pytest.mark.parametrize("name", FATAL)
def test_a_crash_and_a_hang_of_the_device_are_lines(name: str) -> None:
    out, _ = run_in_new_process(
        f"import check_faults, json\nprint(json.dumps(check_faults.fatal({name!r})))",
        **environment("A2"),
    )
    _, verdict, text = json.loads(out.splitlines()[-1])
    assert verdict == "differs"
    assert text.startswith(("the process has ended, ", "")[name == "hang"])
    assert FATAL[name][1] in text


def check(
    folder: Path, env: dict[str, str], *arguments: object, own_process: bool = False
) -> tuple[int, dict[str, Any]]:
    """Runs the command; with `own_process` its probes have one that it starts again."""
    report = folder / "report.json"
    given = ["--json", *map(str, (report, *arguments))]
    call = f"main({given})" if own_process else f"check_here(*{given})"
    status, _, err = ended(f"from check_faults import *\nraise SystemExit({call})", **env)
    assert report.exists(), err
    return status, {x.id: x for x in results.read(report)[1]}


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    env = environment("A2", without=["aclnnSparseFlashAttention"])
    status, found = check(tmp_path, env, "--only", "environment")
    assert status == 1
    differing = [x.text for x in found.values() if x.verdict == "differs"]
    text = "aclnnSparseFlashAttention, which sparse_flash_attention calls, is not in this CANN"
    assert differing == [text]


@pytest.mark.parametrize(
    ("product", "cann"),
    [
        ("A2", "9.1"), ("950", "9.1"),
        *(pytest.param(*x, marks=nightly) for x in
          (("A3", "9.1"), ("310P", "9.1"), ("A2", "9.0"), ("A2", "8.5"))),
    ],
)  # fmt: skip
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
    only = ("--only", "communication")
    status, found = check(tmp_path, environment("A2"), *only, own_process=True)
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
        from ascend_attn_check import behaviour, child
        from ascend_attn_check.probe import Context

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


@pytest.mark.parametrize(
    ("product", "level"),
    [("A2", "0"), *(pytest.param(*x, marks=nightly) for x in (("A2", "1"), ("950", "0")))],
)
def test_the_facts_hold(product: str, level: str, tmp_path: Path) -> None:
    """The dangerous ones are named, and not run."""
    env = {**environment(product), "TASK_QUEUE_ENABLE": level}
    only = ("--only", "known facts")
    status, found = check(tmp_path, env, *only, own_process=level == "1")
    assert [x for x in found.values() if x.verdict == "differs"] == []
    assert status == 0
    if product == "A2":
        not_probed = [x.id for x in found.values() if x.text.startswith("not probed: ")]
        dangerous = [fact.id for fact in FACTS if fact.danger and "9.1" in fact.releases]
        assert not_probed == [f"known facts/{name}" for name in dangerous]
        # The simulated device raises an error for these.
        notes = [x.id for x in found.values() if x.verdict == "note"]
        assert notes == [
            f"known facts/{name}" for name in ("sfag-lengths", "fa-mask-beside-tokens")
        ]


def test_a_stopped_queue_is_not_left_to_the_next_probe(tmp_path: Path) -> None:
    env = {**environment("A2"), "TASK_QUEUE_ENABLE": "1"}
    facts = [f"known facts/{x}" for x in ("sfag-lengths", "fa-mask-beside-tokens")]
    numbers = "numbers/attention_update-*"
    status, found = check(tmp_path, env, "--quick", "--only", *facts, numbers, own_process=True)
    assert status == 0
    assert {found[x].verdict for x in facts} == {"note"}


@pytest.mark.parametrize("cann", [pytest.param("9.0", marks=nightly), "9.1"])
def test_the_dangerous_facts_hold(cann: str, tmp_path: Path) -> None:
    facts = [fact for fact in FACTS if fact.danger and cann in fact.releases]
    dangerous = [f"known facts/{fact.id}" for fact in facts]
    arguments = ("--dangerous", "--only", *dangerous)
    status, found = check(tmp_path, environment("A2", cann), *arguments, own_process=True)
    assert status == 0
    assert {x.id: x.verdict for x in found.values()} == dict.fromkeys(dangerous, "pass")
