"""The recorded calls of CANN's own A2 kernels: docs/numerics.md."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
from ascend_attn_check.kernel_calls import KernelCall, read
from torch import Tensor

from .samples import OPERATORS

FILE = Path(__file__).parents[1] / "recorded/calls.pt.xz"


@cache
def recorded_calls() -> list[KernelCall]:
    """Return all of them; none in a source distribution, which leaves the file out."""
    return read(FILE) if FILE.exists() else []


def assert_same_as_the_kernel(call: KernelCall, actual: dict[str, Tensor]) -> None:
    """Compare the results of an operator with the kernel's, and both with the exact ones."""
    operator = OPERATORS[call.sample.operator]
    if not operator.in_place:
        for results in (actual, call.outputs):
            # Outputs that were not asked for have no elements.
            outputs = [results.get(name, torch.empty(0)) for name in operator.output_names]
            if operator.bounds.expected is None:
                operator.bounds.check(call.sample, tuple(outputs))
            else:
                for expected, x in zip(operator.bounds.expected(call.sample), outputs, strict=True):
                    if x.numel():
                        expected.check(x)
    for distance in call.distances(actual, call.outputs):
        assert distance.allowed, distance


def main() -> None:
    """Print the table of docs/numerics.md."""
    counts: dict[str, int] = defaultdict(int)
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for call in recorded_calls():
        actual = call.run("cpu")
        counts[call.sample.operator] += 1
        for distance in call.distances(actual, call.outputs):
            key = (call.sample.operator, distance.output)
            largest[key] = max(largest[key], distance.difference)
    for operator, count in counts.items():
        cells = [f"{name} {x:.1e}" for (of, name), x in largest.items() if of == operator]
        print(f"| {operator} | {count} | {', '.join(cells)} |")


if __name__ == "__main__":
    main()
