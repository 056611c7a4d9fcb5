"""The sections `communication` and `speed` of the check."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_attn_ops import _library
from ascend_attn_ops.check import communication, speed
from ascend_attn_ops.check.probe import Context, Outcome
from ascend_attn_ops.distributed import _check

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
    assert _check.error(scores, scores) == 0
    assert _check.error(scores + torch.tensor([0, 1, 0]), scores) == 0.25
    assert _check.error(torch.tensor([4.0, -torch.inf, -torch.inf]), scores) == torch.inf
    assert _check.error(torch.tensor([4.0, torch.nan, -torch.inf]), scores) != 0
    assert _check.error(torch.tensor([1, 2, -1]), torch.tensor([1, 3, -1])) == 1


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
        arguments = command[command.index("ascend_attn_ops.distributed._check") :]
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
    text = f"aclnnLightningIndexerGrad {_library.LACKS}"
    answer = {"refusal": text}
    monkeypatch.setattr(communication, "_of_ranks", lambda kind, method: answer)
    found = outcomes({"lightning_indexer"})["lightning_indexer"]
    assert (found.verdict, found.text) == ("skipped", text)
    with pytest.raises(NotImplementedError, match="other"):
        _check.refusal(NotImplementedError("other"))
    assert _check.refusal(NotImplementedError(text)) == answer


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
