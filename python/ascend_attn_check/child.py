"""The process in which probes run: it may crash or hang, and the runner starts another."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from ascend_attn_ops._core import library

from ascend_attn_check import (
    behaviour,
    communication,
    environment,
    host_code,
    known_facts,
    limits,
    numbers,
    recorded_kernels,
    speed,
)
from ascend_attn_check.probe import Context, Outcome, Probe, Probes, Skip
from ascend_attn_check.results import Result, scrub

SECTIONS: dict[str, Probes] = {
    x.SECTION: x.probes
    for x in (
        environment, numbers, limits, known_facts, host_code, recorded_kernels, behaviour,
        communication, speed,
    )
}  # fmt: skip
_numbers = itertools.count(1)


def probes_of(context: Context) -> Iterator[Probe]:
    for probes in SECTIONS.values():
        yield from probes(context)


def run(probe: Probe, context: Context) -> Result:
    """Run a probe; what it raises is a difference."""
    started = time.monotonic()
    try:
        with context.limits():
            outcome = probe.run(context)
            context.synchronize()
    except Skip as reason:
        outcome = Outcome("skipped", str(reason))
    except AssertionError as error:
        outcome = Outcome("differs", str(error) or traceback.format_exc(limit=-1))
    except NotImplementedError as error:
        # The section `environment` has a line for each function.
        is_missing = library.LACKS in str(error)
        outcome = Outcome("skipped" if is_missing else "differs", str(error))
    except Exception as error:
        outcome = Outcome("differs", f"{type(error).__name__}: {error}")
    seconds = round(time.monotonic() - started, 3)
    return Result(
        probe.section, probe.group, probe.id, outcome.verdict, scrub(outcome.text),
        outcome.figures, seconds,
    )  # fmt: skip


def is_healthy(context: Context) -> bool:
    """Whether this process can go on: an error may stop torch_npu's task queue, or the device.

    A stopped queue leaves memory as it was, so each call expects another number. torch_npu's own
    cast goes through the queue on the simulated device as well, where torch's operators do not.
    """
    if not context.on_npu:
        return True
    number = next(_numbers)
    try:
        given = torch.full((8,), number, device=context.device)
        cast = torch.ops.npu.npu_dtype_cast(given, torch.float32)
        right = cast.tolist() == 8 * [number]
        context.synchronize()
    except Exception:
        return False
    return right


def limit_memory(context: Context) -> None:
    if context.on_npu:
        npu = torch.get_device_module("npu")
        npu.set_device(context.device)
        fraction = context.memory / npu.mem_get_info()[1]
        npu.set_per_process_memory_fraction(min(1.0, fraction))


def serve(context: Context, connection: Connection, output: str) -> None:
    """Send the probes, and for the id of each that comes its result, and whether to go on."""
    os.setsid()  # what it starts ends with it
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    limit_memory(context)
    probes = {probe.id: probe for probe in probes_of(context)}
    connection.send([replace(probe, run=_elsewhere) for probe in probes.values()])
    with contextlib.suppress(EOFError, OSError):  # the runner has closed its end
        while True:
            result = run(probes[connection.recv()], context)
            # A probe that expects an error may leave a stopped task queue as well.
            connection.send((result, is_healthy(context)))


def _elsewhere(context: Context) -> Outcome:
    raise NotImplementedError("the child runs it")
