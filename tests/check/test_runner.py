"""The check goes on when a probe ends or stops its process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import crashing_child
import pytest
from ascend_attn_check import child, command, results
from ascend_attn_check.__main__ import main


@pytest.fixture(autouse=True)
def own_child(forked_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "serve", crashing_child.serve)


def check(*arguments: object) -> int:
    return main(["--device", "cpu", "--hang", "3", *map(str, arguments)])


def verdicts(path: Path) -> dict[str, str]:
    return {x.id.partition("/")[2]: x.verdict for x in results.read(path)[1]}


def test_the_cpu_is_checked_where_no_torch_npu_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--hang", "3", "--only", "succeed"]
    monkeypatch.setattr(command.library, "npu_module", lambda: None)
    monkeypatch.setattr(command.library, "npu_unavailable", "no libascendcl.so")
    monkeypatch.setattr(command.importlib.util, "find_spec", {"torch_npu": True}.get)
    with pytest.raises(SystemExit, match=r"--device: expected cpu or .* none: no libascendcl\.so"):
        main(arguments)
    monkeypatch.setattr(command.importlib.util, "find_spec", {}.get)
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("device: cpu\n")


def test_a_crash_and_a_hang_are_lines(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert check("--json", report) == 1
    assert verdicts(report) == {
        "crash": "differs", "succeed": "pass", "hang": "differs", "leave": "differs",
        "skip": "skipped", "fail": "differs", "interrupt": "skipped",
    }  # fmt: skip
    texts = {x.id.partition("/")[2]: x.text for x in results.read(report)[1]}
    assert "signal SIGSEGV" in texts["crash"]
    assert texts["crash"].endswith("the last words")
    assert texts["hang"] == "no answer within 3 seconds"
    assert "exit status 7" in texts["leave"]
    assert texts["skip"] == "not here"
    assert texts["fail"] == "RuntimeError: a file of <elsewhere>/place.py is not here"
    assert texts["interrupt"].startswith("not probed: it stops")


def test_status_0_says_that_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--only", "numbers/succeed", "numbers/skip") == 0
    assert "largest error 0.25" in capsys.readouterr().out
    assert check("--quick") == 0
    assert check("--only", "numbers/fail") == 1


@pytest.mark.parametrize(
    "options",
    [
        *(["--only", name] for name in ("numbers/succeed", "succeed", "suc*", "*/succeed")),
        *(["--quick", "--only", name] for name in ("num*", "numbers", "all", "al*")),
    ],
)
def test_probes_are_chosen_by_name_section_or_group(options: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert check("--json", report, *options) == 0
    assert verdicts(report) == {"succeed": "pass"}


def test_a_name_that_is_none_is_named_beside_those_that_exist() -> None:
    with pytest.raises(SystemExit, match=re.escape(
        "--only: expected a section (numbers), a group such as an operator, or a probe; "
        "similar names: succeed, numbers/succeed, got 'succeeds'"
    )):  # fmt: skip
        check("--only", "numbers/skip", "succeeds")


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = [sys.executable, "-c", (
        # A background job of a shell ignores the signal, and so do its children.
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ascend_attn_check.__main__ import main\n"
        "from ascend_attn_check import command\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import crashing_child\n"
        "command.serve = crashing_child.serve\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )]  # fmt: skip
    only = ["--only", "numbers/succeed", "numbers/skip", "numbers/interrupt"]
    options = ["--device", "cpu", "--dangerous", "--json", str(report), *only]
    ran = subprocess.run(run + options, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "interrupted" in ran.stderr
    assert verdicts(report) == {"succeed": "pass", "skip": "skipped"}
    assert check("--resume", report) == 1
    assert verdicts(report)["succeed"] == "pass"
    assert verdicts(report)["hang"] == "differs"


def test_a_killed_run_has_its_results(tmp_path: Path) -> None:
    report = results.Report(tmp_path / "report.json", {})
    found = results.Result("numbers", "group", "numbers/a", "pass")
    report.add(found)
    header, written = results.read(tmp_path / "report.json")
    assert (header["finished"], written) == (False, [found])


def test_a_run_of_another_device_is_not_resumed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    check("--json", report, "--only", "numbers/succeed")
    with pytest.raises(SystemExit, match="expected a run with quick True, got one with False"):
        check("--resume", report, "--quick")


def test_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, verdict in zip(paths, ("pass", "differs"), strict=True):
        found = [
            results.Result("numbers", "group", "numbers/a", verdict),
            results.Result("numbers", "group", "numbers/b", "pass"),
        ]
        report = results.Report(path, {"device": path.stem})
        report.results += found
        report.write(finished=True)
    assert main(["--compare", *map(str, paths)]) == 1
    written = capsys.readouterr().out
    assert "device: a -> b" in written
    assert "numbers/a: pass -> differs" in written
    assert "1 of 2 differ" in written
    assert main(["--compare", str(paths[0]), str(paths[0])]) == 0


def test_a_file_that_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("", "{}", "[1]", "nothing"):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a report of ascend_attn_check"):
            results.read(path)


def test_verdicts_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--only", "numbers/succeed", "--lang", "zh") == 0
    assert re.search(r"pass 通过", capsys.readouterr().out)


@pytest.mark.parametrize("size", ["2", "GB", "1TB", "x"])
def test_wrong_sizes(size: str) -> None:
    with pytest.raises(SystemExit):
        check("--memory", size)


def test_no_probe_is_lost_to_the_name_of_another() -> None:
    context = child.Context("cpu")
    names = [probe.id for probe in child.probes_of(context)]
    assert len(names) == len(set(names))


def test_a_report_tells_nothing_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr(results.socket, "gethostname", lambda: "machine-of-somebody")
    results._private_names.cache_clear()
    text = f"{sys.prefix}/lib/x.py on machine-of-somebody, {tmp_path}/y.so, 3/4, a/b"
    assert results.scrub(text) == "<python>/lib/x.py on <name>, <elsewhere>/y.so, 3/4, a/b"
    results._private_names.cache_clear()
    assert json.dumps(results.scrub("plain words")) == '"plain words"'


def test_a_known_deviation_is_a_note_until_it_differs_no_more(tmp_path: Path) -> None:
    report, deviations = tmp_path / "report.json", tmp_path / "deviations.json"
    known = {"id": "numbers/fail", "product": "*", "cann": "*", "why": "the file is optional"}
    deviations.write_text(json.dumps([known, {**known, "id": "numbers/succ*"}]))
    only = ("--only", "numbers/fail", "numbers/succeed", "--deviations", deviations)
    assert check("--json", report, *only) == 1
    assert verdicts(report) == {"fail": "note", "succeed": "differs"}
    texts = {x.id.partition("/")[2]: x.text for x in results.read(report)[1]}
    assert texts["fail"].startswith("known: the file is optional: RuntimeError")
    assert texts["succeed"].startswith("no longer differs: remove it")
    elsewhere = [{**known, "product": "950"}]
    deviations.write_text(json.dumps(elsewhere))
    assert check("--json", report, "--only", "numbers/fail", "--deviations", deviations) == 1
