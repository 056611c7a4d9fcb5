"""The sections `communication`, `speed` and `recorded kernels` of the check."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_attn_check import communication, kernel_calls, ranks, recorded_kernels, results, speed
from ascend_attn_check.__main__ import main
from ascend_attn_check.kernel_calls import Distance, KernelCall
from ascend_attn_check.probe import Context, Outcome
from ascend_attn_check.samples import OPERATORS
from ascend_attn_ops._core import library
from ascend_attn_ops._core.device_limits import limits
from torch import Tensor

CPU = Context("cpu")


@pytest.fixture(autouse=True)
def fresh_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "_found", {})


def outcomes(names: set[str]) -> dict[str, Outcome]:
    return {x.name: x.run(CPU) for x in communication.probes(CPU) if x.name in names}


def test_the_operators_equal_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []
    start = communication._start
    monkeypatch.setattr(communication, "_start", lambda *x: starts.append(x) or start(*x))
    names = {*communication.METHODS, *communication.SPARSE_OPERATORS}
    found = outcomes(names)
    assert {name: x.verdict for name, x in found.items()} == dict.fromkeys(names, "pass")
    assert len(starts) == 1
    texts = {name: x.text for name, x in found.items()}
    assert "keys differs in 0 places" in texts["lightning_indexer"]
    for result in ("out", "softmax_max", "softmax_sum", "d_query", "d_latent", "d_key_rope"):
        assert f"{result} differs by" in texts["sparse_flash_attention"]
    for result in ("loss", "d_query_index", "d_key_index", "d_weights"):
        assert f"{result} differs by" in texts["lightning_indexer_kl_loss"]


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
def test_one_wrong_result_is_a_difference(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[str, Any] = {name: {"out": 0.0} for name in communication.SPARSE_OPERATORS}
    errors["lightning_indexer"] = {"keys": wrong, "values": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(communication, "_of_ranks", lambda kind, method: errors)
        found = outcomes(set(communication.SPARSE_OPERATORS))
    assert [name for name, x in found.items() if x.verdict == "differs"] == ["lightning_indexer"]


def test_an_error_is_relative_and_sees_what_is_missing() -> None:
    scores = torch.tensor([4.0, 2.0, -torch.inf])
    assert ranks.error(scores, scores) == 0
    assert ranks.error(scores + torch.tensor([0, 1, 0]), scores) == 0.25
    assert ranks.error(torch.tensor([4.0, -torch.inf, -torch.inf]), scores) == torch.inf
    assert ranks.error(torch.tensor([4.0, torch.nan, -torch.inf]), scores) != 0
    assert ranks.error(torch.tensor([1, 2, -1]), torch.tensor([1, 3, -1])) == 1


# Ranks that hang, or fail, in the second method of the two or three that they are asked for.
RANKS = """
import json, sys, time
for method in sys.argv[3:]:
    if method == "ring":
        {}
    print(json.dumps({"method": method, "errors": {"flash_attention_score": {"out": 0.0}}}))
    sys.stdout.flush()
"""


def ranks_that(monkeypatch: pytest.MonkeyPatch, end: str) -> list[Any]:
    """Returns a list of the starts."""
    code = RANKS.replace("{}", end, 1)
    popen = subprocess.Popen
    starts = []

    def start(command: list[str], **options: Any) -> Any:
        arguments = command[command.index("ascend_attn_check.ranks") :]
        starts.append(arguments)
        return popen([sys.executable, "-c", code, *arguments], **options)

    monkeypatch.setattr(communication.subprocess, "Popen", start)
    return starts


def test_a_hang_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "SECONDS", 8)
    starts = ranks_that(monkeypatch, "time.sleep(600)")
    found = outcomes(set(communication.METHODS))
    assert len(starts) == 1
    assert {name: x.verdict for name, x in found.items()} == {
        "allgather": "pass", "ring": "differs", "ulysses": "skipped",
    }  # fmt: skip
    assert found["ring"].text == "the ranks have not come to an end in 8 seconds"
    assert "they stop in ring" in found["ulysses"].text
    # The runner waits for longer than the ranks may take.
    probe = next(communication.probes(CPU))
    assert 8 + communication.GRACE < probe.longest <= 120


def test_methods_behind_one_that_fails_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that(monkeypatch, "raise ValueError('another')")
    found = outcomes(set(communication.METHODS))
    assert {name: x.verdict for name, x in found.items()} == {
        "allgather": "pass", "ring": "differs", "ulysses": "pass",
    }  # fmt: skip
    assert found["ring"].text == "the ranks fail: ValueError: another"


def test_a_function_that_cann_lacks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"aclnnLightningIndexerGrad {library.LACKS}"
    answer = {"refusal": text}
    monkeypatch.setattr(communication, "_of_ranks", lambda kind, method: answer)
    found = outcomes({"lightning_indexer"})["lightning_indexer"]
    assert (found.verdict, found.text) == ("skipped", text)
    with pytest.raises(NotImplementedError, match="other"):
        ranks.refusal(NotImplementedError("other"))
    assert ranks.refusal(NotImplementedError(text)) == answer


# speed.


class Queue(Context):
    """A device that takes calls in 1 ms, and runs each in 200 ms when the host waits for it."""

    waiting = 0
    ran = 0
    now = 0.0

    def call(self) -> None:
        Queue.waiting += 1
        Queue.now += 0.001

    def synchronize(self) -> None:
        Queue.now += 0.2 * Queue.waiting
        Queue.ran += Queue.waiting
        Queue.waiting = 0


def test_a_slow_device_gets_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: Queue.now))
    queue = Queue("npu:0")
    seconds, host = speed._times(queue.call, queue)
    assert Queue.ran == 5
    assert seconds == pytest.approx(0.201)
    assert host == pytest.approx(0.001)


# recorded kernels: what a difference says, and files that hold no calls.

CASE = OPERATORS["sparse_flash_attention"].cases[0]


def call() -> KernelCall:
    sample = OPERATORS["sparse_flash_attention"].make(CASE, torch.bfloat16)
    names = OPERATORS[sample.operator].output_names
    with limits(None):
        outputs = sample.call(torch.ops.ascend)
    return KernelCall(sample, dict(zip(names, outputs, strict=True)))


def entry(**changes: Any) -> dict[str, Any]:
    made = call()
    described = {
        "operator": made.sample.operator, "what": "a call", "arguments": made.sample.arguments,
        "outputs": made.outputs,
    }  # fmt: skip
    return {**described, **changes}


def check(folder: Path, report: Path) -> tuple[int, list[results.Result]]:
    status = main(
        ["--device", "cpu", "--only", "recorded kernels", "--recorded", str(folder),
         "--json", str(report)]
    )  # fmt: skip
    return status, results.read(report)[1]


@pytest.mark.usefixtures("no_limits", "forked_child")
def test_the_recording_of_a_call_is_compared(tmp_path: Path) -> None:
    wrong = {**call().outputs, "softmax_sum": call().outputs["softmax_sum"] * 1.0001}
    torch.save([entry(), entry(what="another", outputs=wrong)], tmp_path / "calls.pt")
    status, found = check(tmp_path, tmp_path / "report.json")
    assert status == 1
    assert {x.id: x.verdict for x in found} == {
        "recorded kernels/sparse_flash_attention-a_call": "pass",
        "recorded kernels/sparse_flash_attention-another": "differs",
    }
    assert found[0].figures == {"recording": 0.0}
    assert "a finding about the recording or the device" in found[1].text
    # 1e-4 of the sum, where 1e-5 is allowed.
    assert "softmax_sum: from the recording 0.0001 of the maximum, 10.00 of" in found[1].text


NEAR, FAR = [Distance("out", 1e-3, 0.5)], [Distance("out", 1e-1, 50.0)]
OF_NAN = [Distance("softmax_max", 0.0, 0.0), Distance("out", float("nan"), float("nan"))]


@pytest.mark.parametrize(
    ("recording", "cpu", "finding"),
    [
        (NEAR, NEAR, None), (FAR, NEAR, "about the recording or the device"),
        (NEAR, FAR, "about the CPU operator"), (FAR, FAR, "about the device"),
        (OF_NAN, OF_NAN, "about the device"),
    ],
)  # fmt: skip
def test_what_two_columns_say(
    recording: list[Distance], cpu: list[Distance], finding: str | None
) -> None:
    outcome = recorded_kernels.verdict({"recording": recording, "CPU": cpu})
    assert outcome.verdict == ("pass" if finding is None else "differs")
    first = outcome.text.splitlines()[0]
    assert finding is None or f": a finding {finding}; difference from the recording " in first


@pytest.mark.usefixtures("no_limits")
def test_results_are_apart_by_what_an_output_is() -> None:
    made = call()
    near = dict(made.outputs)
    far = {name: x.clone() for name, x in near.items()}
    far["softmax_max"] += 0.01 * far["softmax_max"].abs().max()
    far["out"].view(-1)[0] = torch.nan
    distances = {x.output: x for x in made.distances(far, near)}
    assert [x.allowed for x in distances.values()] == [False, False, True]
    assert distances["softmax_max"].difference == pytest.approx(0.01, rel=1e-3)
    # The distance of an element is measured in its own bound.
    one = OPERATORS["sparse_flash_attention"].bounds.expected
    assert one is not None
    bound = one(made.sample)[0]
    moved = {**near, "out": (bound.exact + 3 * bound.allowed).to(torch.bfloat16)}
    share = made.distances(moved, {**near, "out": bound.exact.to(torch.bfloat16)})[0].share
    assert 1 < share <= 3.1


@pytest.mark.usefixtures("no_limits")
def test_exact_ties_may_be_exchanged() -> None:
    operator = OPERATORS["lightning_indexer"]
    sample = operator.make(operator.cases[0], torch.bfloat16)
    key = sample.arguments["key"].clone()
    key[:, 1] = key[:, 0]
    sample = sample.replace(key=key)
    indices, values = sample.call(torch.ops.ascend)
    made = KernelCall(sample, {"sparse_indices": indices, "sparse_values": values})

    def of_indices(other: Tensor) -> Distance:
        return made.distances({**made.outputs, "sparse_indices": other}, made.outputs)[0]

    exchanged = torch.where(indices < 2, torch.where(indices < 0, -1, 1 - indices), indices)
    assert not torch.equal(exchanged, indices)
    assert of_indices(exchanged).allowed
    assert not of_indices(torch.where(indices >= 0, 6 - indices, indices)).allowed
    assert not of_indices(indices.clamp(min=0)).allowed
    assert not of_indices(torch.where(indices == 2, 100, indices)).allowed


SAVED = {
    "no list": ({"a": 1}, "TypeError"),
    "no operator": ([entry(operator="abs")], "there is no operator 'abs'"),
    "an argument too many": (
        [entry(arguments={**call().sample.arguments, "color": 1})], "has no argument color"
    ),
    "an argument too few": ([entry(arguments={})], "needs an argument query, key"),
    "another output": ([entry(outputs={"d_query": torch.ones(1)})], "has no output 'd_query'"),
    "no tensor": ([entry(outputs={"out": 3})], "has no output 'out'"),
    "no name": ([{"operator": "abs"}], "KeyError: 'what'"),
}  # fmt: skip


@pytest.mark.parametrize("what", SAVED)
def test_a_wrong_file_is_one_line(what: str, tmp_path: Path) -> None:
    content, text = SAVED[what]
    torch.save(content, tmp_path / "calls.pt")
    with pytest.raises(ValueError, match=text) as error:
        kernel_calls.read(tmp_path / "calls.pt")
    assert str(error.value).startswith("calls.pt: expected recorded calls of kernels, but ")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("forked_child")
@pytest.mark.parametrize("name", ["calls.pt", "calls.pt.xz"])
@pytest.mark.parametrize("content", [b"", b"neither", pickle.dumps([ValueError("code")])])
def test_other_files_are_read_by_nothing(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    status, found = check(tmp_path, tmp_path / "report.json")
    assert status == 1
    assert [x.id for x in found] == [f"recorded kernels/{name}"]
    assert found[0].text.startswith(f"{name}: expected recorded calls of kernels, but ")


def test_a_folder_without_calls(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--recorded: expected a folder with \*\.pt or"):
        check(tmp_path, tmp_path / "report.json")


def test_the_section_is_skipped_without_a_folder(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    only = ["--only", "recorded kernels", "--json", str(report)]
    assert main(["--device", "cpu", *only]) == 0
    (found,) = results.read(report)[1]
    assert found.verdict == "skipped"
    assert found.text == "no recorded calls are at hand: --recorded names their folder"
