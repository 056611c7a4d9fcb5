"""What is installed, what works here, and why not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

import torch

import ascend_attn_ops
from ascend_attn_ops import _C, _library
from ascend_attn_ops.limits import product_in_force, table


def print_report() -> int:
    """Print the report; return 0 if the CPU path works, otherwise 1."""
    npu = _library.npu_module()
    print(f"ascend_attn_ops {ascend_attn_ops.__version__}")
    for name, value in _versions(npu).items():
        print(f"  {name:<10} {value}")
    print("\nShared objects")
    print("  _C         loaded")
    print(f"  _npu       {_library.npu_unavailable or 'loaded'}")

    failure = _cpu_failure()
    print(f"\nOperators (limits checked for Ascend {product_in_force()})")
    rows = [("torch.ops.ascend.", "CPU", "Meta", "autograd", "NPU", "needs")]
    for row in table():
        name = row["operator"]
        backends = [_registered(name, key) for key in ("CPU", "Meta")]
        autograd = "no" if name in _C.inference_operators else _registered(name, "Autograd")
        for function in row["aclnn"]:
            npu_state = _npu_state(npu, name, function)
            rows.append((name, *backends, autograd, npu_state, function))
    _print_table(rows)

    print("\nDevice limits")
    for row in table():
        for variant in row["variants"]:
            products, dtypes = (", ".join(variant[name]) for name in ("products", "dtypes"))
            print(f"  {row['operator']}: {products}; {dtypes}")
            for quantity, meaning, allowed in variant["limits"]:
                print(f"      {quantity:<18} {meaning}: {allowed}")

    if failure:
        print(f"\nThe CPU path does not work: {failure}", file=sys.stderr)
        return 1
    print("\nThe CPU path works.")
    return 0


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip())


def _versions(npu: ModuleType | None) -> dict[str, str]:
    try:
        torch_npu = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        torch_npu = "not installed"
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_npu": torch_npu,
        "CANN": npu.cann_version() if npu else "not loaded",
        "SoC": npu.soc_name() if npu else "no NPU",
    }


def _registered(operator: str, dispatch_key: str) -> str:
    name = f"ascend::{operator}"
    return "yes" if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key) else "no"


def _npu_state(npu: ModuleType | None, operator: str, function: str) -> str:
    if npu is None or _registered(operator, "PrivateUse1") == "no":
        return "no"
    return "yes" if npu.has_aclnn(function) else "missing in this CANN"


def _cpu_failure() -> str | None:
    """Run one operator on the smallest input, a token that sees itself; return what went wrong."""
    query = torch.ones(1, 1, 1, 1)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    try:
        with ascend_attn_ops.limits(None):
            out, *_ = ascend_attn_ops.sparse_flash_attention(
                query, query, query, index, scale_value=1.0
            )
    except Exception as error:
        return str(error).splitlines()[0]
    return None if out.item() == 1.0 else f"expected 1.0 from sparse_flash_attention, got {out}"
