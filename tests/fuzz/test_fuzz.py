"""The fuzzer: what it found before, a few cases of every class, and that it would notice."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.gradients import outputs_and_gradients
from ascend_attn_ops import reference
from support.checkout import ROOT
from support.samples import Sample
from support.turns import by_turns
from torch import Tensor

from fuzz import calls, run, valid_autograd
from fuzz.case import Case, Finding

pytest.importorskip("numpy", reason="numpy is not installed")

CLASSES = run.classes()
# `make fuzz` draws others for every commit.
CASES_OF_A_CLASS = 8
# Both sides of these comparisons come from the operators.
OF_TWO_CALLS = ("valid/magnitudes/", "valid/weights/")
OUTPUTS = [
    x
    for x in CLASSES
    if x.startswith("valid/") and not x.startswith(("valid/autograd/", *OF_TWO_CALLS))
]

each_valid_class = pytest.mark.parametrize("name", OUTPUTS)


@pytest.mark.parametrize("line", run.corpus())
def test_found_before(line: str, request: pytest.FixtureRequest) -> None:
    if line.startswith(run.OPEN):
        request.applymarker(pytest.mark.xfail(raises=Finding, strict=True, reason="not mended yet"))
    run.replay(line.removeprefix(run.OPEN))


@pytest.mark.parametrize("name", CLASSES)
def test_a_few_cases(name: str) -> None:
    for number in range(CASES_OF_A_CLASS):
        seed = run.case_seed(0, name, number)
        try:
            run.run_case(CLASSES[name], seed)
        except Finding as finding:
            pytest.fail(f"{run.command(name, seed)}\n{finding}")


@by_turns(4)
@each_valid_class
def test_a_seed_is_a_case(name: str) -> None:
    """Which its class makes from nothing but the generator."""
    seed = run.case_seed(1, name, 0)
    assert run.run_case(CLASSES[name], seed) == run.replay(f"{name}:{seed}")


def findings(name: str, cases: int) -> list[str]:
    found = []
    for number in range(cases):
        try:
            run.run_case(CLASSES[name], run.case_seed(2, name, number))
        except Finding as finding:
            found.append(str(finding))
    return found


def spoiled(call: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The last element of the first output that has one is a little off: of floating point by more
    than a bound allows, of indices by one."""

    def call_and_spoil(sample: Sample, namespace: object) -> tuple[Tensor, ...]:
        outputs = call(sample, namespace)
        if namespace is not reference:
            caches = [x for n, x in sample.tensors.items() if n.endswith("_cache")]
            for x in [*outputs, *caches]:
                if x.numel():
                    last = x.view(-1).view(torch.uint8 if caches else x.dtype)[-1:]
                    last += 1 if caches else 1 + last.abs().to(x.dtype) // 8
                    break
        return outputs

    return call_and_spoil


@by_turns(4)
@each_valid_class
def test_a_wrong_element_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Many outputs of calls without elements have none that could be wrong.
    cases = 60 if "/empty/" in name else 10
    monkeypatch.setattr(Sample, "call", spoiled(Sample.call))
    assert len(findings(name, cases)) >= 5


@by_turns(2)
@pytest.mark.parametrize("name", [x for x in CLASSES if x.startswith(OF_TWO_CALLS)])
def test_a_call_that_differs_from_another_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, numbers = Sample.call, itertools.count()

    def spoiled_every_other_time(sample: Sample, namespace: object) -> tuple[Tensor, ...]:
        factor = 1.5 if namespace is not reference and next(numbers) % 2 else 1
        return tuple(x * factor if x.is_floating_point() else x for x in call(sample, namespace))

    monkeypatch.setattr(Sample, "call", spoiled_every_other_time)
    assert len(findings(name, 20)) >= 5


def test_a_gradient_of_autograd_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(sample: Sample, names: list[str]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs, results = outputs_and_gradients(sample, names)
        return outputs, tuple(x + 1 for x in results)

    monkeypatch.setattr(valid_autograd, "outputs_and_gradients", planted)
    assert findings("valid/autograd/attention_update", 10)


def small_sample() -> Sample:
    x = torch.randn(1, 3, 1, 4)
    indices = torch.zeros(1, 3, 1, 2, dtype=torch.int32)
    inputs = {"query": x, "key": x.clone(), "value": x.clone(), "sparse_indices": indices}
    return Sample("sparse_flash_attention", "small", inputs, {"scale_value": 1.0})


def change_the_key(sample: Sample, outputs: tuple[Tensor, ...]) -> None:
    sample.tensors["key"][0, 0, 0, 0] += 1


def read_new_memory(sample: Sample, outputs: tuple[Tensor, ...]) -> None:
    outputs[0].copy_(torch.empty_like(outputs[0]))


def add_the_threads(sample: Sample, outputs: tuple[Tensor, ...]) -> None:
    outputs[0][0, 0, 0, 0] += torch.get_num_threads()


needs_mallopt = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="fills memory with mallopt"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_the_key, r"^key: the call wrote to it, or beside it \(torch.ops, "),
        pytest.param(
            read_new_memory, r"^output 0: \d+ elements differ between torch.ops, ",
            marks=needs_mallopt,
        ),
        (add_the_threads, r"^output 0: 1 elements differ between torch.ops, "),
    ],
)  # fmt: skip
def test_a_call_that_is_changed_is_found(
    change: Callable[..., None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Sample.call

    def call(sample: Sample, namespace: object) -> tuple[Tensor, ...]:
        outputs = honest(sample, namespace)
        change(sample, outputs)
        return outputs

    monkeypatch.setattr(Sample, "call", call)
    monkeypatch.setattr(calls, "SHARE_OF_THREADS", 1.0)
    with ascend_attn_ops.limits(None), pytest.raises(Finding, match=message):
        calls.run(small_sample(), random.Random(0), same_on_all_threads=True)


def never(random: random.Random) -> str:
    raise Finding("planted")


def sometimes(random: random.Random) -> str:
    if random.random() < 0.5:
        raise KeyError("a defect of the case itself")
    return "fine"


def test_a_campaign_goes_on_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 1000))
    chosen: dict[str, Case] = {"wrong/never": never, "valid/sometimes": sometimes}
    counts = run.campaign(chosen, seed=3, seconds=0.2)
    out = capsys.readouterr().out
    first, second = counts["wrong/never"], counts["valid/sometimes"]
    assert len(first.findings) == first.cases > run.SHOWN
    assert len(second.findings) + second.labels["fine"] == second.cases
    assert len(second.findings) > run.SHOWN
    # Each of a few is shown, with what replays it; the others are only counted.
    assert out.count("FINDING wrong/never seed") == run.SHOWN
    assert "--replay wrong/never:" + str(first.findings[0]) in out
    assert "KeyError: 'a defect of the case itself'" in out
    rows = run.table(counts).splitlines()
    assert rows[1].split()[:3] == ["wrong/never", str(first.cases), str(first.cases)]
    assert "fine" in rows[2]


@pytest.mark.parametrize(("code", "signal"), [("os.kill(os.getpid(), 11)", "SIGSEGV"),
                                              ("time.sleep(100)", "SIGABRT")])  # fmt: skip
def test_a_case_that_ends_its_process_is_found(
    code: str, signal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if signal == "SIGABRT":
        monkeypatch.setattr(run, "CASE_SECONDS", 0.5)
    write = "import os, sys, time; open(sys.argv[1], 'wb').write(b'valid/x:123'); "
    assert run.watch([sys.executable, "-c", write + code]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"FINDING valid/x seed 123\nended by {signal}\n")
    assert out.endswith("--replay valid/x:123\n")


def test_a_script_replays_what_is_found_here() -> None:
    """And runs cases in a process of its own, and says what it does not know."""
    replay = run.command("valid/attention_update", 1).split()[1:]
    cases = ["tests/fuzz/run.py", "--seconds", "0.1", "--only"]
    expected = f"nothing found: {run.replay('valid/attention_update:1')}\n"
    for arguments, status, text in (
        (replay, 0, expected),
        ([*cases, "valid/attention_update"], 0, "seed 0, 0.1 s, 1 classes\n"),
        ([*cases, "nothing"], 2, ""),
    ):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout[: len(text)]) == (status, text), done.stderr
