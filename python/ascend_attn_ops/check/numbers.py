"""Every operator, forward and gradient, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.check.gradients import (
    differentiable_names,
    incoming_gradients,
    outputs_and_gradients,
)
from ascend_attn_ops.check.probe import PASS, Context, Outcome, Probe
from ascend_attn_ops.check.results import ERROR
from ascend_attn_ops.check.samples import (
    OPERATORS,
    Operator,
    Recipe,
    Sample,
    bytes_of,
    named_tensors,
)
from ascend_attn_ops.reference.bounds.expected import OF_TERMS, Expected, magnitude

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
    placed = placed_on(sample, context.device)
    outputs = tuple(x.cpu() for x in placed.call(torch.ops.ascend))
    if recipe.operator.in_place:
        return compare_written(sample, placed, recipe.case.averages)
    return compare(recipe.operator, sample, outputs)


def placed_on(sample: Sample, device: str) -> Sample:
    """Copy a sample with what lies between the elements of its tensors, which "Nct" reads."""

    def place(x: Tensor) -> Tensor:
        whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        whole = whole.to(device, copy=True)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return sample.map_to_device(place)


def compare(operator: Operator, sample: Sample, outputs: tuple[Tensor, ...]) -> Outcome:
    if operator.expected is None:
        operator.assert_matches_reference(sample, outputs)
        return PASS
    return within_bounds(operator.expected(sample), outputs)


def within_bounds(expected: Sequence[Expected], outputs: Sequence[Tensor]) -> Outcome:
    largest = 0.0
    for one, x in zip(expected, outputs, strict=True):
        one.check(x)
        if x.is_floating_point():
            largest = max(largest, one.largest_error(x))
    return Outcome("pass", figures={ERROR: round(largest, 4)})


def compare_written(sample: Sample, placed: Sample, averages: bool) -> Outcome:
    """Compare the caches after a call in place: copies are exact, means are rounded."""
    expected = placed_on(sample, "cpu")
    expected.call(reference)
    for name, x in expected.tensors.items():
        actual = placed.tensors[name].cpu()
        if torch.equal(bytes_of(actual), bytes_of(x)):
            continue
        assert averages, f"{name}: {int((bytes_of(actual) != bytes_of(x)).sum())} bytes differ"
        exact = x.double()
        of_one = 2**-7 if x.dtype == torch.bfloat16 else 2**-8
        Expected(name, exact, of_one * exact.abs().clamp(min=1)).check(actual)
    return PASS


def backward(recipe: Recipe, sample: Sample, context: Context) -> Outcome:
    """Compare autograd on the device with the exact gradient of the outputs of the device."""
    names = differentiable_names(sample)
    outputs, gradients = outputs_and_gradients(placed_on(sample, context.device), names)
    outputs = tuple(x.cpu() for x in outputs)
    expected = expected_gradients(recipe.operator, sample, outputs)
    return within_bounds([expected[name] for name in names], [x.cpu() for x in gradients])


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
