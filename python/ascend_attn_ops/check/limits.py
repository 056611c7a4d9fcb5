"""A call on each side of the rules of the limits, for the product in use.

No call is launched: CANN says in its first phase whether it accepts it. A call outside could write
where it may not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import _library
from ascend_attn_ops.check import boundaries
from ascend_attn_ops.check.probe import PASS, Context, Outcome, Probe, Skip
from ascend_attn_ops.check.samples import named_tensors
from ascend_attn_ops.device_limits import limits

SECTION = "limits"


def probes(context: Context) -> Iterator[Probe]:
    if context.product is None:
        yield Probe(SECTION, "all rules", "all rules", _without_device, quick=True)
        return
    device = "{}:{}".format(*context.product)
    here: dict[str, list[boundaries.Rule]] = {}
    for rule in boundaries.rules():
        if device in rule.devices:
            here.setdefault(rule.operator, []).append(rule)
    for operator, rules in here.items():
        names = _names(rules)
        for rule, name in zip(rules, names, strict=True):
            run = partial(inside, operator, rule.inside)
            yield Probe(SECTION, f"{operator} inside", f"{name}-inside", run, quick=True)
        for rule, name in zip(rules, names, strict=True):
            run = partial(outside, operator, rule.outside)
            yield Probe(SECTION, f"{operator} outside", f"{name}-outside", run, quick=True)


def _names(rules: list[boundaries.Rule]) -> list[str]:
    """By what a rule expects, without the product, so that reports of two can be compared."""
    seen: Counter[str] = Counter()
    names = []
    for rule in rules:
        expected = re.split(r" on (?:Ascend|\{)|, got", rule.text)[0].replace(": expected", "")
        name = re.sub(r"[^\w.]+", "-", f"{rule.operator}-{expected}").strip("-")[:100]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def _without_device(context: Context) -> Outcome:
    raise Skip("the limits are those of an NPU, and this is the CPU")


@contextmanager
def first_phase_only() -> Iterator[None]:
    """End the calls of this thread after their first phase."""
    npu = _library.npu_module()
    assert npu is not None
    npu.set_first_phase_only(True)
    try:
        yield
    finally:
        npu.set_first_phase_only(False)


def refusal_of_device(operator: str, arguments: dict[str, Any], context: Context) -> str | None:
    """Return CANN's error for a call that is not launched; None where CANN accepts it."""
    given = on_device(arguments, context)
    try:
        with first_phase_only():
            getattr(torch.ops.ascend, operator)(**given)
    except RuntimeError as error:
        # ValueError and NotImplementedError, which the library raises itself, pass.
        if isinstance(error, NotImplementedError):
            raise
        return str(error)
    return None


def on_device(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Zeros in the place of meta tensors; a tensor that is passed twice stays one."""
    size = sum(x.untyped_storage().nbytes() for x in named_tensors(arguments).values())
    if size > context.memory:
        raise Skip(f"needs {size / 10**9:.1f} GB; --memory allows {context.memory / 10**9:.1f} GB")
    made: dict[int, Tensor] = {}

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            whole = torch.zeros(
                x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=context.device
            )
            made[id(x)] = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        return made[id(x)]

    return {name: place(x) for name, x in arguments.items()}


def inside(operator: str, arguments: Callable[[], dict[str, Any]], context: Context) -> Outcome:
    refused = refusal_of_device(operator, arguments(), context)
    return Outcome("differs", f"refused by CANN: {refused}") if refused else PASS


def outside(operator: str, arguments: Callable[[], dict[str, Any]], context: Context) -> Outcome:
    given = arguments()
    try:
        getattr(torch.ops.ascend, operator)(**given)
    except (TypeError, ValueError) as error:
        here = str(error)
    else:
        return Outcome("differs", "this library accepts what its rule excludes")
    try:
        with limits(None):
            refused = refusal_of_device(operator, given, context)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise Skip(f"refused without the device's limits as well: {error}") from None
    if refused is None:
        return Outcome("note", f"CANN accepts what this library refuses: {here}")
    return Outcome("pass", refused)
