"""Measures which matrix products are fastest on this processor, and keeps the answer.

Each kind of product runs in processes of its own, in turns, because a process chooses once.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import ascend_attn_ops
from ascend_attn_ops import _C

PRODUCTS = ("bfloat16", "float32", "portable")
ROUNDS = 3
# Bits change with the products, so a choice changes only for a gain beyond noise.
LEAST_GAIN = 1.05
_VARIABLE = "ASCEND_ATTN_OPS_CPU_CAPABILITY"


def calibrate(*, dry_run: bool = False) -> int:
    """Measure, print, and write the choice for later processes; return 0."""
    times: dict[str, list[float]] = {}
    steps = [products for _ in range(ROUNDS) for products in PRODUCTS]
    for number, products in enumerate(steps, 1):
        print(f"\r{number}/{len(steps)} native:{products:<9}", end="", file=sys.stderr, flush=True)
        measured = _times_in_new_process(products)
        best = times.setdefault(products, measured)
        times[products] = [min(pair) for pair in zip(best, measured, strict=True)]
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)

    before = _C.matrix_products()
    names = [name for name, _ in _workloads()]
    print(f"{_C.processor_name()}, bfloat16 tensors, 1 thread, milliseconds")
    print(f"  {'products':<10}" + "".join(f"{name:>24}" for name in names))
    for products, seconds in times.items():
        figures = "".join(f"{1e3 * x:>24.1f}" for x in seconds)
        print(f"  {products:<10}{figures}{'  in use' if products == before else ''}")
    means = {products: _geometric_mean(seconds) for products, seconds in times.items()}
    fastest = min(means, key=means.__getitem__)
    chosen = fastest if means[before] > LEAST_GAIN * means[fastest] else before
    file = _C.measured_choices_file()
    if dry_run or not file:
        print(f"{chosen} (not written)")
        return 0
    write_choice(Path(file), _C.processor_name(), chosen)
    print(f"{chosen}: written to {file}. Processes that start from now on use it.")
    return 0


def write_choice(file: Path, processor: str, products: str) -> None:
    """Replace the line of a processor."""
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [line for line in lines if not line.startswith(f"{processor}\t")]
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.write_text("\n".join([*kept, f"{processor}\t{products}"]) + "\n")
    written.replace(file)


def print_times() -> None:
    """Print the seconds of each workload: what a process of its own runs."""
    torch.set_num_threads(1)
    for _, run in _workloads():
        run()
        seconds = math.inf
        for _ in range(5):
            start = time.perf_counter()
            run()
            seconds = min(seconds, time.perf_counter() - start)
        print(seconds)


def _times_in_new_process(products: str) -> list[float]:
    program = "from ascend_attn_ops import calibration; calibration.print_times()"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        _VARIABLE: f"native:{products}",
    }
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(line) for line in result.stdout.split()]


def _workloads() -> list[tuple[str, Callable[[], object]]]:
    """Steps of training, dense and sparse, with the sizes of models."""

    def dense() -> None:
        query, key, value = (
            torch.ones(1, 4, 1024, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        out, *_ = ascend_attn_ops.flash_attention_score(
            query, key, value, num_heads=4, layout="BNSD", scale_value=0.1
        )
        out.sum().backward()

    def sparse() -> None:
        query, query_rope, key, key_rope = (
            torch.ones(1, *sizes, dtype=torch.bfloat16, requires_grad=True)
            for sizes in [(16, 64, 512), (16, 64, 64), (2048, 1, 512), (2048, 1, 64)]
        )
        indices = torch.arange(2048, dtype=torch.int32).expand(1, 16, 1, 2048)
        out, *_ = ascend_attn_ops.sparse_flash_attention(
            query, key, key, indices, query_rope=query_rope, key_rope=key_rope,
            scale_value=0.1, sparse_mode=0,
        )  # fmt: skip
        out.sum().backward()

    return [("dense, with gradient", dense), ("sparse, with gradient", sparse)]


def _geometric_mean(values: list[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
