"""Measures what the simulation adds to torch's own operators: CPU kernels on NPU tensors.

    python benchmarks/simulated_operators.py

Runs where torch_npu and the simulation are installed. Batches of calls on the CPU and on the
simulated NPU alternate, and their medians count. The last row is a training step of a small model.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("python", "simulation")]

import cann_simulator  # noqa: E402

cann_simulator.start()  # before torch

import torch  # noqa: E402
from harness import Benchmark, Call, interleaved  # noqa: E402
from torch import nn  # noqa: E402

BATCHES, CALLS, STEPS = 50, 200, 5
NAMES = {"cpu": "torch, CPU", "npu": "ours, simulated NPU"}


def calls(device: str) -> dict[str, Call]:
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


def training_step(device: str) -> Call:
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


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=BATCHES)
    torch.set_num_threads(1)

    def show(name: str, both: dict[str, Call], count: int) -> None:
        seconds = interleaved(both, run.rounds, count=count)
        run.show(name, {NAMES[device]: x for device, x in seconds.items()})

    tables = {device: calls(device) for device in NAMES}
    with torch.no_grad():
        for name in tables["cpu"]:
            show(name, {device: table[name] for device, table in tables.items()}, CALLS)
    show("training step", {device: training_step(device) for device in NAMES}, STEPS)


if __name__ == "__main__":
    main()
