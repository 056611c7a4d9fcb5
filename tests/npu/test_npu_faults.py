"""Every function that our operators call, with every way for a call to fail: what the user is told,
what is left behind, and what becomes of the next call."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import pytest
from ascend_attn_ops._core.device_limits import table
from device_samples import KEEPING_EXECUTORS
from faulty_calls import FAULTS, MESSAGE, Fault
from support.samples import OPERATORS
from support.simulated_npu import DEVICE, TASK_QUEUE, run_in_new_process

FUNCTIONS = [(row["operator"], function) for row in table() for function in row["aclnn"]]
# The phases that run on the thread of the task queue, at each of its levels.
PHASES_ON_QUEUE: dict[int, tuple[int, ...]] = {0: (), 1: (2,), 2: (-1, 0, 1, 2)}


def ask(what: str) -> dict[str, Any]:
    """Returns the value of a call of faulty_calls.py in a process of its own."""
    out, _ = run_in_new_process(f"""
        import json, torch
        import ascend_attn_ops
        from faulty_calls import call_that_fails, survey

        torch.set_num_threads(1)
        with ascend_attn_ops.limits(None):  # the sizes of some samples are not the device's
            print(json.dumps({what}))
    """)
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def calls_of() -> dict[str, list[dict[str, Any]]]:
    return ask("survey()")


def test_a_function_of_every_operator_is_called(calls_of: dict[str, Any]) -> None:
    """By a sample; those that are not belong to other products."""
    called = {operator for operator, function in FUNCTIONS if function in calls_of}
    assert called == {row["operator"] for row in table()}


# The state of a queue after a failure on its thread, which may end or wait for more.
STOPPED = "(?:stopped|ended and needs a new process)"


def first_of(function: str) -> str:
    """The function that a call launches before this one, or this one."""
    metadata = f"{function}Metadata"
    return metadata if metadata in {name for _, name in FUNCTIONS} else function


def line_of(operator: str, function: str, fault: Fault) -> str:
    """The pattern of our line, of which there is one."""
    phase = "GetWorkspaceSize" if fault.phase == 1 else ""
    what = f"{fault.of} gave no handle: " if fault.phase == -1 else ""
    code = rf"\[[\w ]*{fault.status}\]"
    return rf"ascend::{operator}: {function}{phase}: {what}{MESSAGE} {code}"


@pytest.mark.parametrize(("operator", "function"), FUNCTIONS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(operator: str, function: str, name: str, calls_of: dict[str, Any]) -> None:
    fault = FAULTS[name]
    if function not in calls_of:
        pytest.skip(f"no sample calls it on {' with CANN '.join(DEVICE)}")
    if fault is not None and fault.phase == 3 and function.endswith("Metadata"):
        pytest.skip("the simulated operator behind it refuses metadata that nothing has written")
    calls = calls_of[function]
    first = first_of(function)
    failing = first if fault is not None and fault.phase == -1 and not fault.last else function
    if TASK_QUEUE == 2 and fault is not None and failing.endswith("Metadata"):
        pytest.skip("the launch behind it fails as well, and either is reported first")
    if fault is not None and fault.found and operator not in KEEPING_EXECUTORS:
        pytest.skip("CANN keeps no executor of it")
    if fault is None and OPERATORS[operator].in_place:
        pytest.skip("allocates no output")
    if fault is not None and fault.phase == -1:
        calls = [call for call in calls if call["handles"][fault.of]]
    if not calls:
        pytest.skip("takes no such argument")
    request = (operator, function, name, calls[0]["recipe"], calls[0]["handles"])
    answer = ask(f"call_that_fails{request}")
    assert set(answer["handles"].values()) == {0}
    assert answer["memory"] == 0
    on_queue = fault is not None and fault.phase in PHASES_ON_QUEUE[TASK_QUEUE]
    # torch_npu's own words where no memory is left, or where a kernel fails once it has been
    # launched, as of its own operators.
    if fault is None or fault.phase == 0:
        line = r"NPU out of memory\. .*"
    elif fault.phase == 3:
        line = rf"(?s:.*)error code is {fault.status}(?s:.*)"
    else:
        line = line_of(operator, failing, fault)
    if on_queue:
        # torch_npu reports it when it likes to, and knows the function alone; its queue is dead.
        assert f"the current working operator name is {failing}." in answer["text"]
        stopped = rf"ascend::{operator}: {first}: torch_npu's task queue has {STOPPED}, after: "
        assert re.fullmatch(rf"{stopped}{line} \[[\w ]*361001\]", answer["next"]), answer["next"]
    else:
        assert re.fullmatch(line, answer["text"]), answer["text"]
        assert answer["where"] == ("wait" if fault is not None and fault.phase == 3 else "call")
        assert answer["next"] == "right"


# A failure on the thread of a task queue stops that queue, so that these tests run in processes of
# their own.
FAILING_CALL = """
    import faulthandler, re
    import ascend_attn_ops as ops, cann_simulator, torch, torch_npu

    faulthandler.dump_traceback_later(60, exit=True)
    inputs = {
        device: torch.ones(1, 8, 2, 64, dtype=torch.bfloat16, device=device)
        for device in ("npu:0", "npu:1")
    }
    for device in inputs:
        torch.npu.synchronize(device)

    def call(device):
        x = inputs[device]
        out = ops.flash_attention_score(x, x, x, num_heads=2, layout="BSND")[0]
        torch.npu.synchronize(device)
        return bool((out.cpu() == 1).all())

    def attempt(device="npu:0"):
        try:
            print("right" if call(device) else "wrong")
        except RuntimeError as error:
            later = re.search("task queue has (stopped|ended)", str(error))
            print(later[1] if later else "failed")

    def fail(device="npu:0"):
        with cann_simulator.fail("aclnnFlashAttentionScoreV2", phase=2):
            attempt(device)
"""


def outcomes_of(code: str) -> list[str]:
    """Runs the attempts of `code` in a new process and returns how each ended."""
    setup = textwrap.dedent(FAILING_CALL)
    return run_in_new_process(setup + textwrap.dedent(code))[0].split()


def test_a_stream_that_launches_synchronously_has_no_queue_to_fail() -> None:
    outcomes = outcomes_of("""
        with torch.npu.stream(torch_npu.npu.SyncLaunchStream()):
            fail()
            attempt()
        attempt()
    """)
    assert outcomes == ["failed", "right", "right"]


def test_a_queue_stops_for_its_device_alone() -> None:
    outcomes = outcomes_of("""
        fail()
        attempt("npu:1")
        attempt()
        with torch.npu.stream(torch_npu.npu.SyncLaunchStream()):
            attempt()
        attempt()
        attempt("npu:1")
    """)
    later = {"stopped", "ended"} if TASK_QUEUE else {"right"}
    assert outcomes[:2] + outcomes[3::2] == ["failed", "right", "right", "right"]
    assert set(outcomes[2::2]) <= later


def test_a_queue_goes_on_after_the_device_is_restarted() -> None:
    outcomes = outcomes_of("""
        fail()
        torch_npu.npu.stop_device(0)
        torch_npu.npu.restart_device(0)
        attempt()
        attempt()
    """)
    # The thread of a queue may end after a failure:
    # nothing revives it, and torch_npu's own work would wait forever.
    assert outcomes == ["failed", "right", "right"] or (
        TASK_QUEUE and outcomes == ["failed", "ended", "ended"]
    )
