"""Compare a call with the reference in float64."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ascend_attn_ops import reference
from ascend_attn_ops._core.arguments import check_memory, check_tensor
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.check.observed_calls import Call, CallObserver
from ascend_attn_ops.check.samples import OPERATORS, Sample, as_tuple, bytes_of

# More would take the reference minutes.
MOST_OPERATIONS = 20_000_000_000

# How far the means that scatter_pa_kv_cache_ writes may be from exact, relative to max(1, |x|).
_OF_MEANS = {torch.float16: 2**-8, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class Difference:
    """A call whose outputs are not what they should be."""

    operator: str
    number: int  # of the call, from 0, among those of the block
    place: str  # the line of the program
    text: str  # outputs, elements, errors

    def __str__(self) -> str:
        return f"call {self.number}, {self.operator} at {self.place}\n{self.text}"


@dataclass
class Comparison:
    """The findings of `compare` so far."""

    calls: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)  # by operator and reason
    differences: list[Difference] = field(default_factory=list)

    def __str__(self) -> str:
        differing = Counter(x.operator for x in self.differences)
        width = max(map(len, self.calls), default=0)
        lines = [f"{'operator':{width}} {'calls':>8} {'compared':>8} {'differ':>8}"]
        lines += [
            f"{name:{width}} {count:8} {self.compared[name]:8} {differing[name]:8}"
            for name, count in self.calls.items()
        ]
        lines += [f"not compared: {reason} ({count})" for reason, count in self.skipped.items()]
        return "\n".join([*lines, *map(str, self.differences)])


class Comparing(CallObserver):
    def __init__(self, name: str, report: Comparison, every: int, rtol: float | None) -> None:
        super().__init__(name)
        self._report, self._every, self._rtol = report, every, rtol
        self._numbers = itertools.count()

    def observe(self, call: Call, run: Callable[[], Any]) -> Any:
        operator, report = call.sample.operator, self._report
        number = next(self._numbers)
        due = report.calls[operator] % self._every == 0
        report.calls[operator] += 1
        in_place = due and OPERATORS[operator].in_place and not_readable(call.sample) is None
        before = on_the_host(call.sample) if in_place else call.sample
        outputs = run()
        if due:
            reason = not_comparable(call.sample)
            if reason is None:
                report.compared[operator] += 1
                text = difference(before, call.sample, as_tuple(outputs), self._rtol)
                if text is not None:
                    report.differences.append(Difference(operator, number, call.place, text))
            else:
                report.skipped[f"{operator}: {reason}"] += 1
        return outputs


def on_the_host(sample: Sample) -> Sample:
    """Copies of its tensors, after a wait for the device."""
    with torch.no_grad():
        return sample.map(lambda x: x.detach().cpu().clone())


def not_readable(sample: Sample) -> str | None:
    """Why the operator refuses a call's tensors, which torch's own functions would crash on."""
    for name, x in sample.tensors.items():
        try:
            check_tensor(sample.operator, name, x)
            check_memory(sample.operator, name, x)
        except (NotImplementedError, TypeError, ValueError) as error:
            return str(error)
    return None


def not_comparable(sample: Sample) -> str | None:
    """Why the reference cannot compute a call, or not in time; None where it can."""
    if sample.options.get("scatter_mode") == "Nct":
        return 'scatter_mode="Nct" reads beyond the elements of its tensors'
    formula = flop_registry.get(getattr(torch.ops.ascend, sample.operator))
    if formula is None:
        return None
    operations = formula(*sample.args, **sample.options)
    if operations <= MOST_OPERATIONS:
        return None
    return f"more than {MOST_OPERATIONS:.0e} operations"


@torch.no_grad()
def difference(
    before: Sample, after: Sample, outputs: Sequence[Tensor], rtol: float | None
) -> str | None:
    """Describes the outputs of a call that are out of bounds; None if none is.

    `before` and `after` differ where the operator writes to its arguments.
    """
    operator = OPERATORS[before.operator]
    host = on_the_host(before)
    if operator.in_place:
        return _written_difference(host, on_the_host(after))
    got = tuple(x.detach().cpu() for x in outputs)
    try:
        with limits(None):
            # A selection has no distance.
            if rtol is None or operator.compare is not None:
                operator.assert_matches_reference(host, got)
            else:
                _assert_close(operator.output_names, got, host.double().call(reference), rtol)
    except AssertionError as error:
        return str(error)
    return None


def _written_difference(before: Sample, after: Sample) -> str | None:
    """Compares caches: copies are exact, the means of "Rope" are rounded."""
    before.call(reference)
    means = before.options.get("scatter_mode") == "Rope"
    lines = []
    for name in ("key_cache", "value_cache"):
        x, y = after.tensors.get(name), before.tensors.get(name)
        if x is None or y is None:
            continue
        differs = (bytes_of(x) != bytes_of(y)).view(x.numel(), -1).any(-1)
        if means and x.dtype in _OF_MEANS:
            exact, rounded = y.flatten().double(), x.flatten().double()
            differs &= ~((rounded - exact).abs() <= _OF_MEANS[x.dtype] * exact.abs().clamp(min=1))
        if bool(differs.any()):
            lines.append(f"{name}: {int(differs.sum())} of {x.numel()} elements differ")
    return "\n".join(lines) or None


def _assert_close(
    names: Sequence[str], got: Sequence[Tensor], exact: Sequence[Tensor], rtol: float
) -> None:
    lines = []
    for name, x, y in zip(names, got, exact, strict=True):
        allowed = rtol * float(y.abs().nan_to_num(0, 0, 0).max()) if y.numel() else 0.0
        same = (x == y) | (x.isnan() & y.isnan())
        outside = ~(same | ((x.double() - y.double()).abs() <= allowed))
        if bool(outside.any()):
            worst = float((x.double() - y.double()).abs().nan_to_num(torch.inf)[outside].max())
            lines.append(
                f"{name}: {int(outside.sum())} of {x.numel()} elements outside, "
                f"the worst by {worst:.3g} where {allowed:.3g} is allowed"
            )
    assert not lines, "\n".join(lines)
