"""All that the generic tests know about an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from ascend_attn_ops.reference.bounds import BOUNDS, Bounds
from ascend_attn_ops.reference.bounds.expected import Expected
from ascend_attn_ops.reference.call import Outputs, Sample
from torch import Tensor


def random_gradient(sample: Sample, outputs: Outputs, output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


@dataclass(frozen=True)
class Gradient:
    """How an operator is differentiated."""

    # The arguments, and the outputs that carry the gradient; the others carry none.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # The gradient operator's call, from sample, outputs and incoming gradients: one result per
    # argument of `inputs`, a list for a list. None where there is no such operator.
    backward: Callable[..., Sequence[Any]] | None = None
    # An incoming gradient, from sample, outputs and an output that carries it.
    incoming: Callable[[Sample, Outputs, Tensor], Tensor] = random_gradient
    # As `backward`: the exact gradients and their bounds; None: not known.
    expected: Callable[..., Sequence[Expected]] | None = None
    # As `backward`, where the reference states its gradients; None: autograd differentiates it.
    stated: Callable[..., Sequence[Any]] | None = None
    # The cases that can be differentiated; the operator refuses the others.
    takes: Callable[[Any], bool] = lambda case: True


@dataclass(frozen=True, eq=False)
class Operator:
    """One record per operator: a test that needs to know something of one asks here."""

    name: str
    cases: Sequence[Any]
    build: Callable[[Any, torch.dtype], Sample]
    gradient: Gradient | None = None
    # Autograd refuses it: its outputs are no constants, and nobody computes their gradient.
    inference_only: bool = False
    # The cases within the limits of the device, a few of each form.
    on_device: Callable[[Any], bool] = lambda case: True
    # A case in sizes that devices accept, which does what the given one does; None: without one.
    sized: Callable[[Any], Any | None] = lambda case: None
    # torch_npu's own operator for the same call; None where it has none.
    torch_npu: Callable[[dict[str, Any]], Any] | None = None
    # It takes DTensors (`distributed/dtensor.py`).
    takes_dtensors: bool = True
    recipes: list[Recipe] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipes", [Recipe(self, case) for case in self.cases])

    @property
    def device_recipes(self) -> list[Recipe]:
        """The recipes and those in sizes of devices, each once."""
        sized = (self.sized(case) for case in self.cases)
        cases = {case.id: case for case in [*self.cases, *filter(None, sized)]}
        return [Recipe(self, case) for case in cases.values()]

    @property
    def bounds(self) -> Bounds:
        return BOUNDS[self.name]

    @property
    def overload(self) -> Any:
        return self.bounds.overload

    @property
    def in_place(self) -> bool:
        return self.bounds.in_place

    @property
    def output_names(self) -> list[str]:
        return self.bounds.output_names

    @property
    def differentiable(self) -> tuple[str, ...]:
        return self.gradient.inputs if self.gradient else ()

    def gradient_outputs(self, outputs: Outputs) -> Outputs:
        """Returns the outputs that carry the gradient."""
        assert self.gradient is not None
        return tuple(outputs[self.output_names.index(name)] for name in self.gradient.outputs)

    def make(self, case: Any, dtype: torch.dtype) -> Sample:
        """Made once, unless calls write to it: tests leave a sample as it is, which one checks."""
        return self.build(case, dtype) if self.in_place else _make(self.build, case, dtype)

    def small_sample(self) -> Sample:
        """A call in bfloat16."""
        return self.make(self.cases[0], torch.bfloat16)


@cache
def _make(build: Callable[[Any, torch.dtype], Sample], case: Any, dtype: torch.dtype) -> Sample:
    return build(case, dtype)


@dataclass(frozen=True)
class Recipe:
    """How to make the sample of a case, in any dtype, when a test asks for it."""

    operator: Operator
    case: Any

    @property
    def id(self) -> str:
        return f"{self.operator.name}-{self.case.id}"

    @property
    def layout(self) -> str:
        return getattr(self.case, "layout", "")

    @property
    def differentiable(self) -> bool:
        gradient = self.operator.gradient
        return gradient is not None and gradient.takes(self.case)

    @property
    def on_device(self) -> bool:
        return self.operator.on_device(self.case)

    def make(self, dtype: torch.dtype) -> Sample:
        return self.operator.make(self.case, dtype)
