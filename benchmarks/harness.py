"""Shared by the benchmarks: interleaved medians, the matmul peak of the same run, extra memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from results import Recorder
from torch import Tensor

Call = Callable[[], object]

PEAK_SIZE = 2048
# Without AVX512, torch multiplies half types in plain loops: its calls would take minutes.
SLOW = 20
# The count that torch chose, before a benchmark sets another.
THREADS = torch.get_num_threads()


def recorder(benchmark: str, path: Path | None) -> Recorder:
    return Recorder(benchmark, path, THREADS)


def causal_selection(tokens: int, selected: int) -> Tensor:
    """Return (1, S, 1, K): K distinct random keys up to each token's own, or all of them and -1."""
    indices = torch.full((1, tokens, 1, selected), -1, dtype=torch.int32)
    for token in range(tokens):
        keys = torch.randperm(token + 1, dtype=torch.int32)[:selected]
        indices[0, token, 0, : len(keys)] = keys
    return indices


@dataclass(frozen=True)
class Row:
    """The median time of one implementation, compared with ours and with the machine."""

    case: str
    implementation: str
    seconds: float
    times_ours: float
    gflops: float
    peak_gflops: float  # of `peak_product`, timed in turn with the others


@cache
def product_seconds() -> dict[torch.dtype, float]:
    """Return the time of a small product of torch in bfloat16 and in float32."""
    operands = {dtype: torch.ones(512, 512, dtype=dtype) for dtype in (torch.bfloat16, torch.float)}
    calls = {str(dtype): partial(torch.mm, x, x) for dtype, x in operands.items()}
    return dict(zip(operands, interleaved_medians(calls, 3).values(), strict=True))


def peak_dtype() -> torch.dtype:
    """Return the dtype in which torch multiplies faster, bfloat16 or float32."""
    seconds = product_seconds()
    return min(seconds, key=lambda dtype: seconds[dtype])


def peak_product() -> Call:
    """Return a large matrix product of torch, in the dtype in which it is faster."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(peak_dtype()) for _ in range(2))
    return partial(torch.mm, a, b)


def read(*tensors: Tensor) -> list[Tensor]:
    """Read tensors once, which no operator on them can do faster."""
    return [x.view(torch.int64).sum() for x in tensors]


def torch_is_slow(dtype: torch.dtype) -> bool:
    """Return whether torch's own attention would take minutes in this dtype."""
    seconds = product_seconds()
    return dtype.itemsize == 2 and seconds[torch.bfloat16] > SLOW * seconds[torch.float]


def measure(
    case: str,
    ours: Call,
    others: Mapping[str, Call],
    products: int,
    rounds: int = 5,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """Time implementations of one operator that needs `products` floating-point operations.

    Torch's are left out where torch is slow in `dtype`.
    """
    if torch_is_slow(dtype):
        others = {name: call for name, call in others.items() if not name.startswith("torch")}
    calls = {"ours": ours, **others, "peak": peak_product()}
    seconds = interleaved_medians(calls, rounds)
    peak = 2 * PEAK_SIZE**3 / seconds.pop("peak") / 1e9
    return [
        Row(case, name, time, time / seconds["ours"], products / time / 1e9, peak)
        for name, time in seconds.items()
    ]


def interleaved_medians(
    calls: Mapping[str, Call], rounds: int, warm: bool = False
) -> dict[str, float]:
    """Return the median seconds of each call, interleaved so that all see the same machine.

    Each is called once before, unless the calls are `warm`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    if not warm:
        for call in calls.values():
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(record: Recorder, rows: Sequence[Row]) -> None:
    """Print the rows as a table, and record them."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    matmul = f"{str(peak_dtype()).removeprefix('torch.')} matmul"
    print(f"{'':64} {'ms':>9} {'x ours':>7} {'GFLOP/s':>8} {matmul:>15} {'share':>6}")
    for row in rows:
        print(
            f"{row.case + ', ' + row.implementation:64} {row.seconds * 1e3:9.1f} "
            f"{row.times_ours:7.1f} {row.gflops:8.0f} {row.peak_gflops:15.0f} "
            f"{row.gflops / row.peak_gflops:6.0%}"
        )
        record.add(
            row.case,
            row.implementation,
            seconds=row.seconds,
            gflops=row.gflops,
            peak_gflops=row.peak_gflops,
        )


def process_memory(field: str) -> int:
    """Return a memory counter of this process in bytes: VmRSS for now, VmHWM for the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _measure(make: Callable[[], Call]) -> int:
    call = make()
    # Memory that make() has freed would be reused without being counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = process_memory("VmRSS")
    kept = call()
    extra = process_memory("VmHWM") - before
    del kept
    return extra


def extra_memory(make: Callable[[], Call]) -> int:
    """Return the peak memory in bytes that one call adds to a fresh process, outputs included.

    `make` prepares the inputs and returns the call. It must be picklable: a function of a module,
    or a partial of one.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, make).result()
