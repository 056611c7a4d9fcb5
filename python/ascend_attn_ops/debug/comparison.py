"""Compare the operators with float64 on the CPU while a program runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ascend_attn_ops import reference
from ascend_attn_ops._core.arguments import (
    check_count,
    check_memory,
    check_number,
    check_tensor,
    refuse_traces,
    shown,
    wrong,
)
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.debug.observed_calls import Call, CallObserver
from ascend_attn_ops.reference.bounds import BOUNDS
from ascend_attn_ops.reference.bounds.expected import Expected
from ascend_attn_ops.reference.call import Sample

_NAME = "ascend_attn_ops.compare"

# More would take the reference minutes.
MOST_OPERATIONS = 20_000_000_000


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


@contextmanager
def compare(every: int = 1, rtol: float | None = None) -> Iterator[Comparison]:
    """Compare each call of an operator in the block with the reference, in float64 on the CPU.

    The program goes on with the device's outputs. ``backward()`` in the block is compared as well,
    each gradient operator given what it was given. Top-k selections are compared as sets, up to
    scores that differ by less than their rounding.

    A compared call waits for the device, and the host may take a thousand times as long: use small
    sizes, or `every`. Calls of more than 2 x 10^10 operations are counted and not compared.

    Args:
        every: compare every n-th call of each operator.
        rtol: None holds each element to the bounds of docs/numerics.md. A number
            allows that much of the largest element of an output.

    Returns:
        A context manager that yields a `Comparison`, with ``calls``, ``compared`` and ``skipped``
        (counts by operator) and ``differences``. Printed, it is a table.

    Raises:
        TypeError, ValueError: `every` is not a number above 0, `rtol` not one of at least 0.
        RuntimeError: the block is entered, or an operator called, in a graph's capture, or the
            block is traced by torch.compile.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 6, 4, 64, dtype=torch.bfloat16)
        >>> key, value = torch.randn(2, 1, 9, 2, 64, dtype=torch.bfloat16)
        >>> with ascend_attn_ops.compare() as report:
        ...     out, *_ = ascend_attn_ops.flash_attention_score(
        ...         query, key, value, num_heads=4, layout="BSND", sparse_mode=3)
        >>> report.compared["flash_attention_score"], report.differences
        (1, [])
    """
    refuse_traces(_NAME)
    every = check_count(_NAME, "every", every, 1)
    if rtol is not None:
        check_number(_NAME, "rtol", rtol)
        rtol = float(rtol)
        if not rtol >= 0:
            raise wrong(ValueError, _NAME, "rtol", "None or a number of at least 0", shown(rtol))
    report = Comparison()
    with _Comparing(_NAME, report, every, rtol):
        yield report


class _Comparing(CallObserver):
    def __init__(self, name: str, report: Comparison, every: int, rtol: float | None) -> None:
        super().__init__(name)
        self._report, self._every, self._rtol = report, every, rtol
        self._numbers = itertools.count()

    def observe(self, call: Call, run: Callable[[], Any]) -> Any:
        operator, report = call.sample.operator, self._report
        number = next(self._numbers)
        due = report.calls[operator] % self._every == 0
        report.calls[operator] += 1
        in_place = due and BOUNDS[operator].in_place and not_readable(call.sample) is None
        before = on_the_host(call.sample) if in_place else call.sample
        outputs = run()
        if due:
            reason = not_comparable(call.sample)
            if reason is None:
                report.compared[operator] += 1
                text = difference(before, call.sample, outputs, self._rtol)
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
def difference(before: Sample, after: Sample, outputs: Any, rtol: float | None) -> str | None:
    """Describes the outputs of a call that are out of bounds; None if none is.

    `before` and `after` differ where the operator writes to its arguments.
    """
    bounds, host = BOUNDS[before.operator], on_the_host(before)
    results = [x.detach().cpu() for x in bounds.results(after, outputs).values()]
    try:
        with limits(None):
            # Neither a selection nor a copy has a distance.
            if rtol is None or bounds.expected is None or bounds.in_place:
                bounds.check(host, results)
            else:
                exact = host.double().call(reference)
                for name, x, y in zip(bounds.output_names, results, exact, strict=True):
                    largest = y.abs().nan_to_num(0, 0, 0).amax() if y.numel() else y.sum()
                    allowed = (rtol * largest.double()).expand(y.shape)
                    Expected(name, y, allowed, rounded=False).check(x)
    except AssertionError as error:
        return str(error)
    return None
