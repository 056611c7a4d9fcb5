"""What the benchmarks share: interleaved medians, the matmul peak of the same run, extra memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

PEAK_SIZE = 2048


@dataclass(frozen=True)
class Row:
    """One implementation's median, and how it compares with ours and with the machine."""

    case: str
    implementation: str
    seconds: float
    times_ours: float
    gflops: float
    peak_gflops: float  # of a large bf16 matmul, timed in turn with the others


def measure(
    case: str, ours: Call, others: Mapping[str, Call], products: int, rounds: int = 5
) -> list[Row]:
    """Times implementations of one operator that need `products` floating-point operations."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).bfloat16() for _ in range(2))
    calls = {"ours": ours, **others, "peak": lambda: a @ b}
    seconds = interleaved_medians(calls, rounds)
    peak = 2 * PEAK_SIZE**3 / seconds.pop("peak") / 1e9
    return [
        Row(case, name, time, time / seconds["ours"], products / time / 1e9, peak)
        for name, time in seconds.items()
    ]


def interleaved_medians(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of each call. One of each in turn: all of them see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def print_table(rows: Sequence[Row]) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'':64} {'ms':>9} {'x ours':>7} {'GFLOP/s':>8} {'bf16 matmul':>12} {'share':>6}")
    for row in rows:
        print(
            f"{row.case + ', ' + row.implementation:64} {row.seconds * 1e3:9.1f} "
            f"{row.times_ours:7.1f} {row.gflops:8.0f} {row.peak_gflops:12.0f} "
            f"{row.gflops / row.peak_gflops:6.0%}"
        )


def _status(field: str) -> int:
    """Bytes that Linux counts for this process: VmRSS now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _measure(make: Callable[[], Call]) -> int:
    call = make()
    # What make() has freed would be used again without being counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = _status("VmRSS")
    kept = call()
    extra = _status("VmHWM") - before
    del kept
    return extra


def extra_memory(make: Callable[[], Call]) -> int:
    """Bytes by which one call raises the memory of a fresh process at its peak, outputs included.

    `make` prepares the inputs and returns the call; it is a function of a module, or a partial one.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, make).result()
