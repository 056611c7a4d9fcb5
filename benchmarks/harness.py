"""Shared by the benchmarks: interleaved medians, the matmul peak of the same run, extra memory."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import ascend_attn_ops
import torch
from results import Recorder
from torch import Tensor

Call = Callable[[], object]

PEAK_SIZE = 2048
# Without AVX512, torch multiplies half types in plain loops: its calls would take minutes.
SLOW = 20
# The count that torch chose, before a benchmark sets another.
THREADS = torch.get_num_threads()


def causal_selection(tokens: int, selected: int) -> Tensor:
    """Return (1, S, 1, K): K distinct random keys up to each token's own, or all of them and -1."""
    indices = torch.full((1, tokens, 1, selected), -1, dtype=torch.int32)
    for token in range(tokens):
        keys = torch.randperm(token + 1, dtype=torch.int32)[:selected]
        indices[0, token, 0, : len(keys)] = keys
    return indices


@cache
def product_seconds() -> dict[torch.dtype, float]:
    """Return the time of a small product of torch in bfloat16 and in float32."""
    operands = {dtype: torch.ones(512, 512, dtype=dtype) for dtype in (torch.bfloat16, torch.float)}
    calls = {str(dtype): partial(torch.mm, x, x) for dtype, x in operands.items()}
    return dict(zip(operands, interleaved(calls, 3).values(), strict=True))


def peak_dtype() -> torch.dtype:
    """Return the dtype in which torch multiplies faster, bfloat16 or float32."""
    seconds = product_seconds()
    return min(seconds, key=lambda dtype: seconds[dtype])


def peak_product() -> Call:
    """Return a large matrix product of torch, in the dtype in which it is faster."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(peak_dtype()) for _ in range(2))
    return partial(torch.mm, a, b)


def kept(indices: Tensor, keys: int) -> Tensor:
    """Return selected keys, (S, K) with -1 for none, as a mask of all keys."""
    # An extra last column takes the padding.
    columns = torch.where(indices < 0, keys, indices).long()
    return torch.zeros(len(indices), keys + 1, dtype=torch.bool).scatter_(1, columns, True)[:, :-1]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def heads_of(query_heads: int, key_heads: int) -> str:
    return str(query_heads) if query_heads == key_heads else f"{query_heads}/{key_heads}"


def read(*tensors: Tensor) -> list[Tensor]:
    """Read tensors once, which no operator on them can do faster."""
    return [x.view(torch.int64).sum() for x in tensors]


def torch_is_slow(dtype: torch.dtype) -> bool:
    """Return whether torch's own attention would take minutes in this dtype."""
    seconds = product_seconds()
    return dtype.itemsize == 2 and seconds[torch.bfloat16] > SLOW * seconds[torch.float]


def interleaved(
    calls: Mapping[str, Call],
    rounds: int,
    *,
    count: int = 1,
    warm: bool = False,
    between: Call = lambda: None,
    of: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the seconds of each call, interleaved so that all see the same machine.

    Each is called once before, unless the calls are `warm`. A round times `count` calls of each;
    `of` the rounds, their median counts, or the fastest of short ones, which ran undisturbed.
    The time of `between`, before each round, does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    if not warm:
        for call in calls.values():
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            between()
            start = time.perf_counter()
            for _ in range(count):
                call()
            seconds[name].append((time.perf_counter() - start) / count)
    return {name: of(times) for name, times in seconds.items()}


class Benchmark(Recorder):
    """One run of a benchmark: its options, its calls without limits, and its results.

    `options` are those beside `--rounds` and `--json`, with their defaults.
    """

    def __init__(self, file: str, doc: str | None, rounds: int, **options: Any) -> None:
        parser = argparse.ArgumentParser(
            description=(doc or "").split("\n\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        parser.add_argument("--rounds", type=int, default=rounds, help="timings of each")
        parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to it")
        for name, value in options.items():
            several = "+" if isinstance(value, list) else None
            parser.add_argument(
                f"--{name}", type=int, nargs=several, default=value, help="(%(default)s)"
            )
        self.options = parser.parse_args()
        self.rounds: int = self.options.rounds
        super().__init__(Path(file).stem, self.options.json, THREADS)
        ascend_attn_ops.set_limits(None)
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")

    def show(self, case: str, seconds: Mapping[str, float], **figures: float) -> None:
        """Print a line, in milliseconds and as multiples of the first, and record its rows."""
        first = next(iter(seconds.values()))
        cells = [f"{name} {x * 1e3:.4g} ms, {x / first:.2f}x" for name, x in seconds.items()]
        print(f"{case:56} {'; '.join(cells)}", flush=True)
        for name, x in seconds.items():
            self.add(case, name, seconds=x, **figures)

    def add_to_all(self, case: str, figure: str, values: Mapping[str, float]) -> None:
        """Print one more figure of each implementation, and record it."""
        print(f"{figure:>56} {', '.join(f'{name} {x:.4g}' for name, x in values.items())}")
        for name, x in values.items():
            self.add(case, name, **{figure: x})

    def time(self, case: str, calls: Mapping[str, Call], **options: Any) -> None:
        self.show(case, interleaved(calls, self.rounds, **options))

    def measure(
        self,
        case: str,
        ours: Call,
        others: Mapping[str, Call],
        products: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Time implementations of one operator that needs `products` floating-point operations.

        Torch's are left out where torch is slow in `dtype`.
        """
        if torch_is_slow(dtype):
            others = {name: call for name, call in others.items() if not name.startswith("torch")}
        seconds = interleaved({"ours": ours, **others, "peak": peak_product()}, self.rounds)
        peak = 2 * PEAK_SIZE**3 / seconds.pop("peak") / 1e9
        reached = {name: products / x / 1e9 for name, x in seconds.items()}
        self.show(case, seconds)
        self.add_to_all(case, "gflops", reached)
        self.add_to_all(case, "peak_gflops", dict.fromkeys(reached, peak))


def process_memory(field: str) -> int:
    """Return a memory counter of this process in bytes: VmRSS for now, VmHWM for the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _measure(make: Callable[[], Call], threads: int) -> int:
    torch.set_num_threads(threads)
    ascend_attn_ops.set_limits(None)
    call = make()
    # Memory that make() has freed would be reused without being counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = process_memory("VmRSS")
    result = call()
    extra = process_memory("VmHWM") - before
    del result
    return extra


def extra_memory(make: Callable[[], Call]) -> int:
    """Return the peak memory in bytes that one call adds to a fresh process, outputs included.

    `make` prepares the inputs and returns the call. It must be picklable: a function of a module,
    or a partial of one.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, make, torch.get_num_threads()).result()
