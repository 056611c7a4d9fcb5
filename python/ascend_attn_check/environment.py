"""Describes the machine that the check runs on."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial

import ascend_attn_ops
import torch
from ascend_attn_ops import _C
from ascend_attn_ops._core import built_with, library
from ascend_attn_ops._core.device_limits import device_in_force, table
from ascend_attn_ops.debug.report import OF_950, is_of_product, path_of, versions

from ascend_attn_check.probe import Context, Outcome, Probe

SECTION = "environment"


def probes(context: Context) -> Iterator[Probe]:
    facts = _host_facts() | (_npu_facts() if context.on_npu else {})
    for name, fact in facts.items():
        yield Probe(SECTION, name, name, partial(_noted, fact), quick=True)
    if context.on_npu:
        yield Probe(SECTION, "NPU kernels", "NPU kernels", _npu_kernels, quick=True)
        for operator, function, needed in _functions():
            run = partial(_function, operator, function, needed)
            yield Probe(SECTION, "aclnn functions", function, run, quick=True)


def _noted(fact: Callable[[Context], str], context: Context) -> Outcome:
    return Outcome("pass", fact(context))


def _host_facts() -> dict[str, Callable[[Context], str]]:
    def version(name: str) -> Callable[[Context], str]:
        return lambda context: versions(library.npu_module())[name]

    return {
        "ascend_attn_ops": lambda context: ascend_attn_ops.__version__,
        "python": version("python"),
        "torch": version("torch"),
        "torch_npu": version("torch_npu"),
        "host": lambda context: (
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
            f"{torch.get_num_threads()} threads, torch uses "
            + torch.backends.cpu.get_cpu_capability()
        ),
        "CPU kernels": lambda context: ", ".join(
            f"{kind} {name}" for kind, name in _C.cpu_implementations().items()
        ),
        "compiled": lambda context: f"{_C.compiler}; _C {_built('_C')}; _npu {_built('_npu')}",
    }


def _built(module: str) -> str:
    return ", ".join(f"{name} {version}" for name, version in built_with.versions(module).items())


def _npu_facts() -> dict[str, Callable[[Context], str]]:
    libraries = ("libascendcl.so", "libopapi.so", "libcust_opapi.so", "libhccl.so")
    return {
        "product": lambda context: "{} with CANN {}".format(*(device_in_force() or ("?", "?"))),
        "SoC": lambda context: versions(library.npu_module())["SoC"],
        "CANN": lambda context: versions(library.npu_module())["CANN"],
        "driver": lambda context: _driver(),
        "devices": lambda context: str(torch.get_device_module("npu").device_count()),
        "task queue": lambda context: os.environ.get("TASK_QUEUE_ENABLE", "1, torch_npu's default"),
        "determinism": lambda context: (
            "on" if torch.are_deterministic_algorithms_enabled() else "off"
        ),
        "libraries": lambda context: ", ".join(
            path for path in map(path_of, libraries) if "/" in path
        ),
    }


def _driver() -> str:
    """Return the version that the driver's package has left in its usual place."""
    path = "/usr/local/Ascend/driver/version.info"
    try:
        with open(path, encoding="utf-8") as file:
            return " ".join(file.read().split())
    except OSError:
        return "not found"


def _npu_kernels(context: Context) -> Outcome:
    reason = library.npu_unavailable
    if reason:
        return Outcome("differs", f"the NPU kernels are not loaded: {reason}")
    return Outcome("pass", f"loaded, built with {_built('_npu')}, {sys.implementation.cache_tag}")


def _functions() -> Iterator[tuple[str, str, bool]]:
    """The aclnn functions that operators call here, and whether each is needed."""
    device = device_in_force()
    for row in table():
        if device is None or (device.product, device.cann) not in row["devices"]:
            continue
        for function in row["aclnn"]:
            # The other versions replace a first that is missing, or compute what it does not.
            family = [x for x in row["aclnn"] if _family(x) == _family(function)]
            needed = function == family[0]
            if OF_950 in row["aclnn"]:
                needed = is_of_product(row["aclnn"], function)
            yield row["operator"], function, needed


def _family(function: str) -> str:
    return re.sub(r"V\d$", "", function)


def _function(operator: str, function: str, needed: bool, context: Context) -> Outcome:
    if context.has_aclnn(function):
        return Outcome("pass", f"{operator} calls {function}")
    text = f"{function}, which {operator} calls, is not in this CANN"
    return Outcome("differs" if needed else "note", text)
