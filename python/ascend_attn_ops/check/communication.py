"""The distributed operators on two devices, against the call of one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch

from ascend_attn_ops.check.bounds import OF_TERMS
from ascend_attn_ops.check.probe import Context, Outcome, Probe, Skip

SECTION = "communication"
METHODS = ("allgather", "ring", "ulysses")
SPARSE_OPERATORS = ("lightning_indexer", "sparse_flash_attention", "lightning_indexer_kl_loss")
SECONDS = 50  # less than the runner waits


def probes(context: Context) -> Iterator[Probe]:
    for method in METHODS:
        operator = "flash_attention_score"
        yield Probe(SECTION, operator, method, partial(_run, method, operator))
    for operator in SPARSE_OPERATORS:
        yield Probe(SECTION, operator, operator, partial(_run, "sparse", operator))


def _run(method: str, operator: str, context: Context) -> Outcome:
    if context.on_npu and torch.get_device_module("npu").device_count() < 2:
        raise Skip("there is one device")
    found = _of_ranks("npu" if context.on_npu else "cpu", method)
    if isinstance(found, Outcome):
        return found
    errors = found.get(operator)
    if errors is None:
        return Outcome("refused", found["refusal"])
    text = ", ".join(
        f"{name} differs in {x:.0f} places" if name == "keys"
        else f"{name} differs by {x:.2g} of the maximum"
        for name, x in errors.items()
    )  # fmt: skip
    # Both sides round each element; the ring rounds the parts that it merges as well.
    right = all(x <= 2 * OF_TERMS[torch.bfloat16] for x in errors.values())
    return Outcome("pass" if right else "differs", text)


@cache
def _of_ranks(kind: str, method: str) -> dict[str, Any] | Outcome:
    """Starts two ranks, once for all lines of a method."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "ascend_attn_ops.distributed._check", kind, method,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ranks:  # fmt: skip
        try:
            output, errors = ranks.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its ranks
            return Outcome("differs", f"the ranks have not come to an end in {SECONDS} seconds")
    if ranks.returncode:
        lines = [x for x in errors.splitlines() if "Error" in x] or errors.splitlines()
        return Outcome("differs", "the ranks fail: " + "\n".join(lines[:3]))
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found
