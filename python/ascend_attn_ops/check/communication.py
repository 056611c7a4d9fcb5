"""The distributed operators on two devices, against the call of one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from ascend_attn_ops.check.bounds import OF_TERMS
from ascend_attn_ops.check.probe import Context, Outcome, Probe, Skip

SECTION = "communication"
METHODS = ("allgather", "ring", "ulysses")
SECONDS = 50  # less than the runner waits


def probes(context: Context) -> Iterator[Probe]:
    for method in METHODS:
        yield Probe(SECTION, "flash_attention_score", method, partial(_run, method))


def _run(method: str, context: Context) -> Outcome:
    kind = "npu" if context.on_npu else "cpu"
    if context.on_npu and torch.get_device_module("npu").device_count() < 2:
        raise Skip("there is one device")
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
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    text = ", ".join(f"{name} differs by {x:.2g} of the maximum" for name, x in found.items())
    # Both sides round each element; the ring rounds the parts that it merges as well.
    right = all(x <= 2 * OF_TERMS[torch.bfloat16] for x in found.values())
    return Outcome("pass" if right else "differs", text)
