"""Calls of the `out=` overloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from support.samples import OPERATORS, RECIPES, Operator, Recipe, Sample, as_tuple, bytes_of

FORMS = [x for x in OPERATORS.values() if x.inference_only and not x.in_place]
OUT_RECIPES: list[Recipe] = [recipe for recipe in RECIPES if recipe.operator in FORMS]

RUBBISH = 0x5A


def overload(operator: Operator) -> Any:
    return getattr(torch.ops.ascend, operator.name).out


def fill(x: Tensor) -> Tensor:
    """With bytes that no result has, and that are no NaN."""
    if x.numel():
        x.detach().view(-1).view(torch.uint8).fill_(RUBBISH)
    return x


def rubbish_like(outputs: tuple[Tensor, ...], device: str | None = None) -> tuple[Tensor, ...]:
    return tuple(
        fill(torch.empty(x.shape, dtype=x.dtype, device=device or x.device)) for x in outputs
    )


@dataclass(frozen=True)
class OutCall:
    """A sample, and the tensors to be written."""

    operator: Operator
    sample: Sample
    outputs: tuple[Tensor, ...]

    def run(self) -> tuple[Tensor, ...]:
        given = dict(zip(self.operator.output_names, self.outputs, strict=True))
        arguments = self.sample
        return as_tuple(overload(self.operator)(*arguments.args, **arguments.options, **given))

    def bytes(self) -> list[Tensor]:
        """Returns copies of the bytes of all tensors that are passed."""
        passed = (*self.sample.tensors.values(), *self.outputs)
        return [bytes_of(in_memory(x)).clone() for x in passed if has_bytes(x)]

    def with_output(self, index: int, output: Any) -> OutCall:
        outputs = list(self.outputs)
        outputs[index] = output
        return OutCall(self.operator, self.sample, tuple(outputs))

    def with_inputs(self, **inputs: Any) -> OutCall:
        return OutCall(self.operator, self.sample.replace(**inputs), self.outputs)


def in_memory(x: Tensor) -> Tensor:
    """A negated view, as its memory is."""
    return torch._neg_view(x) if x.is_neg() else x


def has_bytes(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and not x.is_meta
        and x.layout == torch.strided
        and x.untyped_storage().nbytes() > 0
    )


def out_call(recipe: Recipe, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> OutCall:
    """Returns a valid call whose outputs hold other values."""
    sample = recipe.make(dtype)
    outputs = rubbish_like(sample.call(torch.ops.ascend), device)
    return OutCall(recipe.operator, sample.to(device), outputs)
