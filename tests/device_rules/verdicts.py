"""Asks this library about the parameter sets that CANN's checks were asked about."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascend_attn_ops
import torch
from ascend_attn_ops._core.device_limits import Device

FOLDER = Path(__file__).with_name("verdicts")
OPERATORS = sorted(path.name.removesuffix(".jsonl.xz") for path in FOLDER.iterdir())

# Whose launch is another function than CANN was asked about.
LAUNCHED_BY_ANOTHER = {("prompt_flash_attention", "950")}

# The limits of a development branch are those of the newest version.
VERSION_OF_BRANCH = {"8.5.0": "8.5", "9.0.0": "9.0", "9.1.0": "9.1", "master": "9.1"}


@dataclass(frozen=True)
class ParameterSet:
    operator: str
    arguments: dict[str, Any]
    verdicts: dict[str, bool]  # by product and branch, as in "A2 9.1.0"

    def call(self, device: Device) -> str | None:
        """Return the error of a call on meta tensors; None where the call is accepted."""
        name = self.operator + ("_" if self.operator == "scatter_pa_kv_cache" else "")
        operator = getattr(torch.ops.ascend, name)
        arguments = {key: _value(value) for key, value in self.arguments.items()}
        if self.operator.startswith("sparse_flash_attention"):
            # CANN's function has one kernel, for a value that is key; its tiling does not compare.
            key, value = self.arguments["key"], self.arguments["value"]
            arguments["value"] = arguments["key"] if key == value else arguments["value"]
        with ascend_attn_ops.limits(*device):  # type: ignore[arg-type]
            try:
                operator(**arguments)
            except (TypeError, ValueError, NotImplementedError) as error:
                return str(error)
        return None


def device_of(name: str) -> Device:
    product, branch = name.split()
    return Device(product, VERSION_OF_BRANCH[branch])


def parameter_sets(operator: str) -> Iterator[ParameterSet]:
    with lzma.open(FOLDER / f"{operator}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            verdicts = {
                device: accepted
                for accepted, devices in ((True, entry["accepted"]), (False, entry["refused"]))
                for device in devices
            }
            yield ParameterSet(operator, entry["arguments"], verdicts)


@dataclass(frozen=True)
class Answer:
    """The verdict of a device on a parameter set, and this library's error for it."""

    parameters: ParameterSet
    device: str
    accepted_there: bool
    error_here: str | None

    @property
    def agrees(self) -> bool:
        return self.accepted_there == (self.error_here is None)

    @property
    def rule(self) -> str:
        """The error without its numbers, which differ from call to call."""
        return re.sub(r"\d[\d.]*", "#", self.error_here or "accepted")


def answers(operator: str) -> Iterator[Answer]:
    for parameters in parameter_sets(operator):
        errors: dict[Device, str | None] = {}
        for name, accepted in parameters.verdicts.items():
            device = device_of(name)
            if (operator, device.product) in LAUNCHED_BY_ANOTHER:
                continue
            if device not in errors:
                errors[device] = parameters.call(device)
            yield Answer(parameters, name, accepted, errors[device])


def _value(value: Any) -> Any:
    """A tensor stands as its shape and dtype: nothing reads its elements."""
    if not isinstance(value, dict):
        return value
    return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta")
