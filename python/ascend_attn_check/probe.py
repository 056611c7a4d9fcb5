"""The probes that make up a section of the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from ascend_attn_ops._core import library
from ascend_attn_ops._core.device_limits import Device, device_in_force, limits
from ascend_attn_ops.reference.call import Sample

Verdict = Literal["pass", "differs", "refused", "skipped", "note"]


@dataclass(frozen=True)
class Outcome:
    """The finding of a probe, in words and in figures."""

    verdict: Verdict
    text: str = ""
    figures: dict[str, float] = field(default_factory=dict)


PASS = Outcome("pass")


class Skip(Exception):
    """Raised by a probe that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Context:
    """Where the probes of a process run."""

    device: str  # as torch names it: cpu, npu:0
    quick: bool = False
    memory: int = 2 * 10**9  # bytes that probes may take on the device
    recorded: Path | None = None  # the folder of recorded calls

    @property
    def on_npu(self) -> bool:
        return self.device.startswith("npu")

    @property
    def product(self) -> Device | None:
        """The device whose limits apply: that of the NPU in use; None on the CPU."""
        return device_in_force() if self.on_npu else None

    def limits(self) -> AbstractContextManager[None]:
        """Lift the limits on the CPU, where most samples are smaller than a device accepts."""
        return nullcontext() if self.on_npu else limits(None)

    def synchronize(self) -> None:
        if self.on_npu:
            torch.get_device_module("npu").synchronize()

    def has_aclnn(self, function: str) -> bool:
        npu = library.npu_module()
        return npu is not None and bool(npu.has_aclnn(function))

    def refusal(self, sample: Sample) -> str | None:
        """Return the error with which the limits refuse a call, found on meta tensors."""
        if not self.on_npu:
            return None
        try:
            sample.map(lambda x: x.to("meta")).call(torch.ops.ascend)
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Probe:
    """One line of a section."""

    section: str
    group: str  # lines of the table with equal groups are shown as one
    name: str  # unique within the section
    run: Callable[[Context], Outcome]
    quick: bool = False
    # The harm that the probe may do to the device or the process; it runs only on request.
    danger: str = ""
    longest: float = 0.0  # seconds that it may take, if more than those of --hang

    @property
    def id(self) -> str:
        return f"{self.section}/{self.name}"


def skipping(section: str, name: str, reason: str) -> Probe:
    """The only line of a section that cannot run here."""

    def run(context: Context) -> Outcome:
        raise Skip(reason)

    return Probe(section, name, name, run, quick=True)


Probes = Callable[[Context], Iterator[Probe]]
