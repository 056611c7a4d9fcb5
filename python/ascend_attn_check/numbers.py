"""Every operator, forward and gradient, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.reference.bounds import BOUNDS, check
from ascend_attn_ops.reference.bounds.expected import OF_TERMS, Expected, magnitude
from ascend_attn_ops.reference.call import Sample, named_tensors
from torch import Tensor

from ascend_attn_check.gradients import (
    differentiable_names,
    incoming_gradients,
    outputs_and_gradients,
)
from ascend_attn_check.probe import PASS, Context, Outcome, Probe
from ascend_attn_check.results import ERROR
from ascend_attn_check.samples import OPERATORS, Operator, Recipe

SECTION = "numbers"
HALF = (torch.bfloat16, torch.float16)
# float64 is the CPU's alone.
ALL = (*HALF, torch.float32, torch.float64)

Run = Callable[[Recipe, Sample, Context], Outcome]


def probes(context: Context) -> Iterator[Probe]:
    dtypes = (*HALF, torch.float32) if context.on_npu else ALL
    recipes = {
        operator: operator.device_recipes if context.on_npu else operator.recipes
        for operator in OPERATORS.values()
    }
    for operator in OPERATORS.values():
        for dtype in dtypes:
            for recipe in recipes[operator]:
                yield _probe(forward, recipe, dtype, "")
    for operator in OPERATORS.values():
        for dtype in dtypes:
            for recipe in recipes[operator]:
                if recipe.differentiable:
                    yield _probe(backward, recipe, dtype, " through autograd")


def _probe(run: Run, recipe: Recipe, dtype: torch.dtype, what: str) -> Probe:
    short = str(dtype).removeprefix("torch.")
    name = f"{recipe.operator.name}{what}"
    quick = recipe.on_device and dtype == torch.bfloat16
    return Probe(
        SECTION, f"{name} {short}", f"{recipe.id}{what.replace(' ', '-')}-{short}",
        partial(_within_limits, run, recipe, dtype), quick,
    )  # fmt: skip


def _within_limits(run: Run, recipe: Recipe, dtype: torch.dtype, context: Context) -> Outcome:
    sample = recipe.make(dtype)
    if refused := context.refusal(sample):
        return Outcome("refused", refused)
    try:
        return run(recipe, sample, context)
    except (TypeError, ValueError, NotImplementedError) as error:
        # Some limits are of values, which meta tensors lack; the gradient has limits of its own.
        if " Ascend " in str(error):
            return Outcome("refused", str(error))
        raise


def forward(recipe: Recipe, sample: Sample, context: Context) -> Outcome:
    placed = sample.copied_to(context.device)
    outputs = placed.call(torch.ops.ascend)
    return compare(sample, recipe.operator.bounds.results(placed, outputs).values())


def compare(sample: Sample, results: Iterable[Tensor]) -> Outcome:
    """Compare the results of a call, of a copy of this sample, with the reference."""
    return of_largest(BOUNDS[sample.operator].check(sample, [x.cpu() for x in results]))


def of_largest(error: float | None) -> Outcome:
    return PASS if error is None else Outcome("pass", figures={ERROR: round(error, 4)})


def backward(recipe: Recipe, sample: Sample, context: Context) -> Outcome:
    """Compare autograd on the device with the exact gradient of the outputs of the device."""
    names = differentiable_names(sample)
    outputs, gradients = outputs_and_gradients(sample.copied_to(context.device), names)
    outputs = tuple(x.cpu() for x in outputs)
    expected = expected_gradients(recipe.operator, sample, outputs)
    return of_largest(check([expected[x] for x in names], [x.cpu() for x in gradients]))


def expected_gradients(
    operator: Operator, sample: Sample, outputs: tuple[Tensor, ...]
) -> dict[str, Expected]:
    """Returns the gradients that autograd must give, by the names of tensors."""
    gradient = operator.gradient
    assert gradient is not None
    incoming = incoming_gradients(sample, outputs)
    if gradient.expected is not None:
        of_arguments: Sequence[Any] = gradient.expected(sample, outputs, *incoming)
        return dict(zip(gradient.inputs, of_arguments, strict=True))
    # The operator states this gradient from its outputs, or torch computes it in float64.
    exact_outputs = tuple(x.double() for x in outputs)
    exact_incoming = tuple(x.double() for x in incoming)
    formula = gradient.stated or gradient.backward
    assert formula is not None
    with limits(None):
        exact = formula(sample.double(), exact_outputs, *exact_incoming)
    expected = {}
    for name, x in named_tensors(dict(zip(gradient.inputs, exact, strict=True))).items():
        largest = magnitude(x).amax() if x.numel() else torch.zeros(())
        dtype = sample.tensors[name].dtype
        allowed = max(OF_TERMS[dtype], OF_TERMS[torch.float32]) * largest.clamp(min=1)
        expected[name] = Expected(f"gradient of {name}", x, allowed.expand(x.shape))
    return expected
