"""One call of an operator, and how to make variants of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What an operator returns; one output comes as a tensor."""
    return (outputs,) if isinstance(outputs, Tensor) else outputs


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, by name: `inputs` are positional, `options` keyword-only."""

    operator: str
    id: str
    inputs: dict[str, Any]
    options: dict[str, Any]

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(self.inputs.values())

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.inputs, **self.options}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}

    def call(self, namespace: Any) -> tuple[Tensor, ...]:
        """Runs the operator of `namespace`: torch.ops.ascend, or the references."""
        return as_tuple(getattr(namespace, self.operator)(*self.args, **self.options))

    def replace(self, **changes: Any) -> Sample:
        unknown = changes.keys() - self.arguments.keys()
        assert not unknown, f"{self.operator} has no {unknown}"
        inputs = {name: changes.get(name, x) for name, x in self.inputs.items()}
        options = {name: changes.get(name, x) for name, x in self.options.items()}
        return replace(self, inputs=inputs, options=options)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """A tensor that is passed twice (key as value) stays one tensor."""
        mapped: dict[int, Tensor] = {}
        for x in self.tensors.values():
            if id(x) not in mapped:
                mapped[id(x)] = function(x)
        return self.replace(**{name: mapped[id(x)] for name, x in self.tensors.items()})

    def double(self) -> Sample:
        return self.map(lambda x: x.double() if x.is_floating_point() else x)

    def to(self, device: str) -> Sample:
        return self.map(lambda x: x.to(device))

    def clone(self) -> Sample:
        return self.map(Tensor.clone)

    def requires_grad(self, names: tuple[str, ...]) -> Sample:
        """Leaves of their own for `names`; everything else is detached."""
        wanted = [id(x) for name, x in self.tensors.items() if name in names]
        return self.map(lambda x: x.detach().clone().requires_grad_(id(x) in wanted))

    def strided(self) -> Sample:
        """The same values with gaps between the elements, filled with what would be noticed."""
        return self.map(lambda x: torch.stack((x, torch.full_like(x, _noticed(x))), -1)[..., 0])

    def transposed(self) -> Sample:
        """The same values with the dimensions in memory in reverse order."""
        return self.map(
            lambda x: (
                x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
            )
        )


def _noticed(x: Tensor) -> float:
    if x.is_floating_point():
        return torch.nan
    return {torch.bool: 1, torch.uint8: 255, torch.int8: 127}.get(x.dtype, 2**30)


class Case(Protocol):
    """The sizes and options of a sample: all that distinguishes it, without its tensors."""

    @property
    def id(self) -> str: ...

    def resized(self) -> Case:
        """Other sizes along the dimensions that torch.compile may treat as dynamic."""
        ...


@cache
def _make(build: Callable[[Any, torch.dtype], Sample], case: Any, dtype: torch.dtype) -> Sample:
    """Made once: the tests leave samples as they are, which one of them checks."""
    return build(case, dtype)


@dataclass(frozen=True)
class Recipe:
    """How to make the sample of a case, in any dtype, when a test asks for it."""

    operator: str
    case: Any
    build: Callable[[Any, torch.dtype], Sample]
    # The operator refuses to differentiate what its Grad operator does not take.
    differentiable: bool = True
    # False where the gradient is a stated one, which finite differences do not give.
    gradcheck: bool = True

    @property
    def id(self) -> str:
        return f"{self.operator}-{self.case.id}"

    def make(self, dtype: torch.dtype) -> Sample:
        return _make(self.build, self.case, dtype)

    def resized(self) -> Recipe:
        return replace(self, case=self.case.resized())
