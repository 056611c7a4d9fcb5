"""The distributed operators on two devices, against the call of one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from ascend_attn_ops._core import library
from ascend_attn_ops.reference.bounds.expected import OF_TERMS

from ascend_attn_check.probe import Context, Outcome, Probe, Skip

SECTION = "communication"
METHODS = ("allgather", "ring", "ulysses")
SPARSE = "sparse"
SPARSE_OPERATORS = ("lightning_indexer", "sparse_flash_attention", "lightning_indexer_kl_loss")
# Two ranks import torch and run all methods in 18 to 35 seconds on two cores that other programs
# load threefold. The ranks of all lines start once, so a hang costs this time once.
SECONDS = 80
GRACE = 30  # seconds that torchrun waits for ranks that it has asked to end

Found = dict[str, Any] | Outcome
_found: dict[str, dict[str, Found]] = {}  # by kind of device and method


def probes(context: Context) -> Iterator[Probe]:
    dense = [(method, "flash_attention_score", method) for method in METHODS]
    sparse = [(name, name, SPARSE) for name in SPARSE_OPERATORS]
    for name, operator, method in (*dense, *sparse):
        run = partial(_run, method, operator)
        yield Probe(SECTION, operator, name, run, longest=SECONDS + GRACE + 5)


def _run(method: str, operator: str, context: Context) -> Outcome:
    if context.on_npu and torch.get_device_module("npu").device_count() < 2:
        raise Skip("there is one device")
    found = _of_ranks("npu" if context.on_npu else "cpu", method)
    if isinstance(found, Outcome):
        return found
    errors = found.get(operator)
    if errors is None:
        text = found["refusal"]
        return Outcome("skipped" if library.LACKS in text else "refused", text)
    text = ", ".join(
        f"{name} differs in {x:.0f} places" if name == "keys"
        else f"{name} differs by {x:.2g} of the maximum"
        for name, x in errors.items()
    )  # fmt: skip
    # Both sides round each element; the ring rounds the parts that it merges as well.
    right = all(x <= 2 * OF_TERMS[torch.bfloat16] for x in errors.values())
    return Outcome("pass" if right else "differs", text)


def _of_ranks(kind: str, method: str) -> Found:
    """Returns what the ranks have found; the first call starts them, with its method first."""
    if kind not in _found:
        others = [x for x in (*METHODS, SPARSE) if x != method]
        _found[kind] = _of_all(kind, [method, *others])
    return _found[kind][method]


def _of_all(kind: str, methods: Sequence[str]) -> dict[str, Found]:
    """Starts two ranks for all methods, and again for those behind a method that fails."""
    found: dict[str, Found] = {}
    until = time.monotonic() + SECONDS
    while left := [x for x in methods if x not in found]:
        given, failure = _start(kind, left, until - time.monotonic())
        found |= given
        left = [x for x in left if x not in given]
        if failure is not None and left:
            found[left[0]] = failure
            if time.monotonic() > until - SECONDS / 2:
                text = (
                    f"the ranks have not come to it: they stop in {left[0]}; --only runs it alone"
                )
                found |= dict.fromkeys(left[1:], Outcome("skipped", text))
    return found


def _start(
    kind: str, methods: Sequence[str], seconds: float
) -> tuple[dict[str, Found], Outcome | None]:
    """Returns what two ranks have found by method, and how they end before their time."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "ascend_attn_check.ranks", kind, *methods,
    ]  # fmt: skip
    failure = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ranks:  # fmt: skip
        try:
            output, errors = ranks.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its ranks
            output, errors = ranks.communicate()
            text = f"the ranks have not come to an end in {SECONDS} seconds"
            failure = Outcome("differs", text)
    if failure is None and ranks.returncode:
        lines = [x for x in errors.splitlines() if "Error" in x] or errors.splitlines()
        failure = Outcome("differs", "the ranks fail: " + "\n".join(lines[:3]))
    # Libraries print to standard output as well.
    answers = [json.loads(x) for x in output.splitlines() if x.startswith('{"method": ')]
    return {x["method"]: x["errors"] for x in answers}, failure
