"""Reports what is installed, what works here, and why not."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from ascend_attn_ops import _C
from ascend_attn_ops._core import built_with, library
from ascend_attn_ops._core.arguments import first_line
from ascend_attn_ops._core.device_limits import Device, device_in_force, limits, table
from ascend_attn_ops._core.torch_private import has_kernel

# Beside English, with --lang zh.
CHINESE = {
    "Shared objects": "动态库", "CPU kernels use here": "本机的 CPU kernel",
    "Operators": "算子",
    "The CPU path works.": "CPU 路径可用。", "The CPU path does not work": "CPU 路径不可用",
}  # fmt: skip


def language_of_locale() -> str:
    """Returns "zh" if the messages of this process are to be Chinese, otherwise "en"."""
    names = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides
    name = next((os.environ[x] for x in names if os.environ.get(x)), "")
    return "zh" if name.startswith("zh") else "en"


class Words:
    """The words of a table in a language."""

    def __init__(self, language: str, chinese: Mapping[str, str]) -> None:
        self._chinese = chinese if language == "zh" else {}

    def __call__(self, english: str) -> str:
        chinese = self._chinese.get(english)
        return f"{english} {chinese}" if chinese else english


def version() -> str:
    """The package's, which has debug below it."""
    return str(sys.modules["ascend_attn_ops"].__version__)


def print_report(language: str = "en") -> int:
    """Print the report; return 0 if the CPU path works, otherwise 1."""
    words = Words(language, CHINESE)
    npu = library.npu_module()
    print(f"ascend_attn_ops {version()}")
    for name, value in versions(npu).items():
        print(f"  {name:<10} {value}")
    print(f"\n{words('Shared objects')}")
    print(f"  _C         loaded{_built_with_text('_C')}, {_C.compiler}")
    print(f"  _npu       {library.npu_unavailable or 'loaded' + _built_with_text('_npu')}")

    print(f"\n{words('CPU kernels use here')}")
    for kind, implementation in _C.cpu_implementations().items():
        print(f"  {kind:<19} {implementation}")

    failure = _cpu_failure()
    device = device_in_force()
    checked = f"limits checked for {device}" if device else "limits off"
    print(f"\n{words('Operators')} ({checked}; `limits` shows them)")
    rows = [("torch.ops.ascend.", "CPU", "Meta", "autograd", "NPU", "needs")]
    for row in table():
        name = row["operator"]
        backends = [_registered(name, key) for key in ("CPU", "Meta")]
        autograd = "no" if name in _C.inference_operators else _registered(name, "Autograd")
        for function in row["aclnn"]:
            npu_state = _npu_state(npu, row, function)
            rows.append((name, *backends, autograd, npu_state, function))
    _print_table(rows)

    if failure:
        print(f"\n{words('The CPU path does not work')}: {failure}", file=sys.stderr)
        return 1
    print(f"\n{words('The CPU path works.')}")
    return 0


def print_limits(device: Device) -> int:
    """Print what every operator accepts on a device, and what other versions of CANN change."""
    print(f"Limits of {device}; in brackets what another version of CANN changes")
    for row in table():
        versions = {
            cann: _statements(limits)
            for (product, cann), limits in row["devices"].items()
            if product == device.product
        }
        here = versions.pop(device.cann, None)
        print(f"\n{row['operator']}")
        if here is None:
            elsewhere = f" (but with CANN {', '.join(versions)})" if versions else ""
            print(f"    not on this device{elsewhere}")
            continue
        names = dict.fromkeys([*here, *(name for other in versions.values() for name in other)])
        for name in names:
            text = here.get(name, "no limit")
            changes = [
                f"CANN {cann}: {other.get(name, 'no limit')}"
                for cann, other in versions.items()
                if other.get(name, "no limit") != text
            ]
            print(f"    {name}: {text}" + (f" [{'; '.join(changes)}]" if changes else ""))
    return 0


def _statements(limits: dict[str, Any]) -> dict[str, str]:
    """The quantities and arguments of an operator on one device, and what they may be."""
    statements = {"dtypes": ", ".join(limits["dtypes"])}
    for quantity, meaning, allowed in limits["limits"]:
        statements[f"{quantity}, {meaning}"] = allowed
    for argument, expected in limits["rules"]:
        statements[argument] = "; ".join(filter(None, [statements.get(argument), expected]))
    return statements


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip())


def versions(npu: ModuleType | None) -> dict[str, str]:
    try:
        torch_npu = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        torch_npu = "not installed"
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_npu": torch_npu,
        "CANN": f"{npu.cann_version()}, {path_of('libascendcl.so')}" if npu else "not loaded",
        "SoC": npu.soc_name() if npu else "no NPU",
    }


def path_of(library: str) -> str:
    """Return the file of a library that this process has loaded: it tells which CANN is in use."""
    with open("/proc/self/maps") as maps:
        paths = (line.split()[-1] for line in maps)
        return next((path for path in paths if path.endswith(f"/{library}")), library)


def _built_with_text(module: str) -> str:
    built = ", ".join(f"{name} {version}" for name, version in built_with.versions(module).items())
    return f", built with {built}"


def _registered(operator: str, dispatch_key: str) -> str:
    name = f"ascend::{operator}"
    return "yes" if has_kernel(name, dispatch_key) else "no"


# Ascend 950 has this function in the place of the others of its operators.
OF_950 = "aclnnFusedInferAttentionScoreV5"


def is_of_product(functions: Sequence[str], function: str) -> bool:
    """Whether an operator that calls these functions calls this one on the product in force."""
    device = device_in_force()
    on_950 = device is not None and device.product == "950"
    return OF_950 not in functions or (function == OF_950) == on_950


def _npu_state(npu: ModuleType | None, row: dict[str, Any], function: str) -> str:
    if npu is None or _registered(row["operator"], "PrivateUse1") == "no":
        return "no"
    if not is_of_product(row["aclnn"], function):
        return "of another product"
    return "yes" if npu.has_aclnn(function) else "missing in this CANN"


def _cpu_failure() -> str | None:
    """Run one operator on the smallest input, a token that sees itself; return what went wrong."""
    query = torch.ones(1, 1, 1, 1)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    try:
        with limits(None):
            out, *_ = torch.ops.ascend.sparse_flash_attention(
                query, query, query, index, scale_value=1.0
            )
    except Exception as error:
        return first_line(error)
    return None if out.item() == 1.0 else f"expected 1.0 from sparse_flash_attention, got {out}"
