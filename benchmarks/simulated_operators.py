"""Measures what the simulation adds to torch's own operators: CPU kernels on NPU tensors.

    python benchmarks/simulated_operators.py

Runs where torch_npu and the simulation are installed. Batches of calls on the CPU and on the
simulated NPU alternate; the table shows the medians over batches, in microseconds per call. The
last row is a training step of a small model, in milliseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("python", "simulation")]

import cann_simulator  # noqa: E402
from results import Recorder, parser  # noqa: E402

BATCHES, CALLS, STEPS = 50, 200, 5
NAMES = {"cpu": "torch, CPU", "npu": "ours, simulated NPU"}


def calls(device: str) -> dict[str, Callable[[], object]]:
    import torch

    x, y = (torch.ones(16, 16, device=device) for _ in range(2))
    out = torch.empty(16, 16, device=device)
    index = torch.arange(8, device=device)
    parameters = [torch.ones(16, device=device) for _ in range(20)]
    return {
        "add": lambda: x + y,
        "add_, in place": lambda: x.add_(y),
        "add with out=": lambda: torch.add(x, y, out=out),
        "mm": lambda: x @ y,
        "sum": lambda: x.sum(),
        "softmax": lambda: x.softmax(1),
        "to float16": lambda: x.half(),
        "index": lambda: x[index],
        "transpose, add": lambda: x.t() + y,
        "foreach add_, 20 tensors": lambda: torch._foreach_add_(parameters, 1),
    }


def training_step(device: str) -> Callable[[], object]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 256).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def medians(
    functions: dict[str, Callable[[], object]], count: int, batches: int
) -> dict[str, float]:
    """Return seconds per call, by device."""
    samples: dict[str, list[float]] = {device: [] for device in functions}
    for _ in range(batches):
        for device, function in functions.items():
            start = time.perf_counter()
            for _ in range(count):
                function()
            samples[device].append((time.perf_counter() - start) / count)
    return {device: statistics.median(times) for device, times in samples.items()}


def main() -> None:
    arguments = parser(__doc__, rounds=BATCHES).parse_args()
    record = Recorder("simulated_operators", arguments.json)
    rounds = arguments.rounds
    cann_simulator.start()
    import torch

    torch.set_num_threads(1)
    tables: dict[str, Any] = {device: calls(device) for device in ("cpu", "npu")}
    print(f"{'microseconds per call':<28}{'CPU':>10}{'NPU':>10}{'more':>10}")
    with torch.no_grad():
        for name in tables["cpu"]:
            functions = {device: table[name] for device, table in tables.items()}
            times = medians(functions, CALLS, rounds)
            for device, seconds in times.items():
                record.add(name, NAMES[device], seconds=seconds)
            cpu, npu = (times[device] * 1e6 for device in ("cpu", "npu"))
            print(f"{name:<28}{cpu:>10.1f}{npu:>10.1f}{npu - cpu:>10.1f}", flush=True)
    steps = medians({device: training_step(device) for device in ("cpu", "npu")}, STEPS, rounds)
    for device, seconds in steps.items():
        record.add("training step", NAMES[device], seconds=seconds)
    cpu, npu = steps["cpu"] * 1e3, steps["npu"] * 1e3
    print(f"{'training step, milliseconds':<28}{cpu:>10.2f}{npu:>10.2f}{npu / cpu:>9.2f}x")


if __name__ == "__main__":
    main()
