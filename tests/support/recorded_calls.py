"""Calls that CANN's own A2 kernels have computed: their arguments and their results.

The kernels' sources were compiled for x86 and executed on an emulated AI core: docs/numerics.md.
The file is a list of {operator, what, arguments, outputs}, in which equal tensors are stored once.
"""

from __future__ import annotations

import io
import lzma
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.check.samples.lightning_indexer import all_scores
from torch import Tensor

from .samples import OPERATORS, Sample, bytes_of

FILE = Path(__file__).parents[1] / "recorded/calls.pt.xz"


@dataclass(frozen=True, eq=False)
class RecordedCall:
    sample: Sample
    outputs: dict[str, Tensor]

    @property
    def id(self) -> str:
        return f"{self.sample.operator}-{self.sample.id}".replace(" ", "_")

    def run(self, device: str) -> dict[str, Tensor]:
        """Return what the operator computes there, by the names of the recorded outputs."""
        sample = self.sample.clone().to(device)
        outputs = sample.call(torch.ops.ascend)
        names = OPERATORS[sample.operator].output_names
        named = dict(zip(names, outputs, strict=True)) if outputs else sample.tensors
        return {name: named[name].cpu() for name in self.outputs}

    def check(self, actual: dict[str, Tensor]) -> None:
        """Compare the results of an operator with the kernel's, and both with the exact ones."""
        operator = OPERATORS[self.sample.operator]
        if operator.in_place:
            for name, x in actual.items():
                assert torch.equal(bytes_of(x), bytes_of(self.outputs[name])), name
            return
        both = [self._all_outputs(results) for results in (actual, self.outputs)]
        if operator.expected is None:
            for outputs in both:
                operator.assert_matches_reference(self.sample, outputs)
        else:
            for expected, *pair in zip(operator.expected(self.sample), *both, strict=True):
                for x in pair:
                    if x.numel():
                        expected.check(x)
        for name, difference, allowed in self.differences(actual):
            assert difference <= allowed, f"{name}: {difference:.3g} of the maximum"

    def _all_outputs(self, results: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Outputs that were not asked for have no elements."""
        names = OPERATORS[self.sample.operator].output_names
        return tuple(results.get(name, torch.empty(0)) for name in names)

    def differences(self, actual: dict[str, Tensor]) -> Iterator[tuple[str, float, float]]:
        """The largest difference of each output, and the allowed one, relative to the maximum."""
        for name, expected in self.outputs.items():
            x, y = actual[name], expected
            # Half types have the bounds of each element instead.
            allowed = 1e-5 if y.dtype == torch.float32 else torch.inf
            if name == "sparse_indices":
                # Exact ties may be exchanged: equal scores in equal slots.
                x, y = self._scores_of(x), self._scores_of(y)
                allowed = 0.0
            elif name == "sparse_values":
                allowed = torch.finfo(y.dtype).eps  # one ulp
            yield name, relative_difference(x, y), allowed

    def _scores_of(self, sparse_indices: Tensor) -> Tensor:
        """The exact scores of the selected keys, in descending order."""
        scores = _exact_scores(self)
        chosen = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
        columns = torch.where(sparse_indices < 0, scores.shape[-1], sparse_indices).long()
        return chosen.gather(-1, columns).sort(-1, descending=True).values


@cache
def _exact_scores(call: RecordedCall) -> Tensor:
    return all_scores(call.sample)


def relative_difference(x: Tensor, y: Tensor) -> float:
    """Returns the difference relative to the maximum; equal infinities do not differ."""
    assert x.shape == y.shape
    x, y = x.double(), y.double()
    difference = torch.where(x == y, 0, (x - y).abs())
    largest = y[y.isfinite()].abs().max() if y.isfinite().any() else torch.ones(())
    return float(difference.max() / largest.clamp(min=1e-30))


@cache
def recorded_calls() -> list[RecordedCall]:
    """Return all of them; none in a source distribution, which leaves the file out."""
    if not FILE.exists():
        return []
    with lzma.open(FILE) as file:
        calls: list[dict[str, Any]] = torch.load(io.BytesIO(file.read()), weights_only=True)
    return [_recorded(call) for call in calls]


def _recorded(call: dict[str, Any]) -> RecordedCall:
    parameters = signature(getattr(reference, call["operator"])).parameters
    arguments = call["arguments"]
    positional = [x for x in parameters if parameters[x].kind != Parameter.KEYWORD_ONLY]
    sample = Sample(
        call["operator"],
        call["what"],
        {name: arguments[name] for name in positional},
        {name: x for name, x in arguments.items() if name not in positional},
    )
    return RecordedCall(sample, call["outputs"])


def main() -> None:
    """Print the table of docs/numerics.md."""
    counts: dict[str, int] = defaultdict(int)
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for call in recorded_calls():
        actual = call.run("cpu")
        counts[call.sample.operator] += 1
        for name, difference, _ in call.differences(actual):
            key = (call.sample.operator, name)
            largest[key] = max(largest[key], difference)
    for operator, count in counts.items():
        cells = [f"{name} {x:.1e}" for (of, name), x in largest.items() if of == operator]
        print(f"| {operator} | {count} | {', '.join(cells)} |")


if __name__ == "__main__":
    main()
