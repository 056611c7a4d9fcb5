"""A call on each side of the rules of the limits, for the product in use.

CANN says in its first phase whether it accepts a call. A call outside is never launched: it could
write where it may not. A small call inside is launched, and compared with the reference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from ascend_attn_ops._core import library
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.reference.call import LENGTHS_ON_HOST, Sample, named_tensors, sample_of
from torch import Tensor

from ascend_attn_check import boundaries
from ascend_attn_check.numbers import compare
from ascend_attn_check.probe import Context, Outcome, Probe, Skip, skipping
from ascend_attn_check.samples import OPERATORS

SECTION = "limits"
# Larger calls end after their first phase: the reference takes too long for them.
MOST_PRODUCTS = 2**24
# Names of the operators' arguments.
QUERIES, KEYS = ("query", "query_index"), ("key", "ori_kv", "key_index")
# The compressed masks of the sparse modes, which are triangles.
COMPRESSED = (2048, 2048)


def probes(context: Context) -> Iterator[Probe]:
    if context.product is None:
        yield skipping(SECTION, "all rules", "the limits are those of an NPU, and this is the CPU")
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


@contextmanager
def first_phase_only() -> Iterator[None]:
    """End the calls of this thread after their first phase."""
    npu = library.npu_module()
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
    """Zeros in the place of tensors; a tensor that is passed twice stays one. Lengths that have
    values keep them."""
    size = sum(x.untyped_storage().nbytes() for x in named_tensors(arguments).values())
    if size > context.memory:
        raise Skip(f"needs {size / 10**9:.1f} GB; --memory allows {context.memory / 10**9:.1f} GB")
    made: dict[int, Tensor] = {}

    def place(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or (name in LENGTHS_ON_HOST and not x.is_meta):
            return x
        if id(x) not in made:
            whole = torch.zeros(
                x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=context.device
            )
            made[id(x)] = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        return made[id(x)]

    return {name: place(name, x) for name, x in arguments.items()}


def inside(operator: str, arguments: Callable[[], dict[str, Any]], context: Context) -> Outcome:
    given = arguments()
    if refused := refusal_of_device(operator, given, context):
        return Outcome("differs", f"refused by CANN: {refused}")
    if reason := _not_launched(given, context):
        return Outcome("pass", f"first phase only: {reason}")
    schema = OPERATORS[operator].overload._schema.arguments
    defaults = {x.name: x.default_value for x in schema if x.has_default_value()}
    sample = _with_values(sample_of(operator, "inside", {**defaults, **given}))
    outputs = sample.copied_to(context.device).call(torch.ops.ascend)
    return compare(sample, outputs)


def _not_launched(arguments: dict[str, Any], context: Context) -> str | None:
    """Returns why a call ends after its first phase; None if it is launched."""
    if context.quick:
        return "--quick launches none of these calls"
    tensors = named_tensors(arguments)
    for name, x in tensors.items():
        is_selection = name.endswith("sparse_indices")
        if x.is_meta and not (x.dtype == torch.bool or x.is_floating_point() or is_selection):
            return f"{name} has integers, and arbitrary ones may be wrong"
    queries, keys = (
        next((tensors[name] for name in names if name in tensors), None)
        for names in (QUERIES, KEYS)
    )
    if queries is None or keys is None:
        return None
    products = queries.numel() * keys.numel() // max(1, queries.shape[-1])
    if products > MOST_PRODUCTS:
        return f"{products} products are more than {MOST_PRODUCTS}"
    return None


def _with_values(sample: Sample) -> Sample:
    """Replaces meta tensors by random values, masks of no key and a selection of the first key."""
    generator = torch.Generator().manual_seed(0)

    def fill(x: Tensor) -> Tensor:
        if not x.is_meta:
            return x
        size = (x.untyped_storage().nbytes() // x.itemsize,)
        if x.is_floating_point():
            whole = 0.25 + 0.5 * torch.rand(size, generator=generator)
        else:
            whole = torch.full(size, 0 if x.dtype == torch.bool else -1)
        filled = whole.to(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        if x.dtype == torch.bool and x.shape[-2:] == COMPRESSED:
            filled.copy_(torch.ones(COMPRESSED, dtype=torch.bool).triu(1))
        elif x.dtype == torch.int32:
            filled[..., 0] = 0
        return filled

    filled = sample.map(fill)
    # A sum of exp(score - maximum) is at least 1.
    sums = {name: 1 + x for name, x in filled.tensors.items() if name.startswith("softmax_sum")}
    return filled.replace(**sums)


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
