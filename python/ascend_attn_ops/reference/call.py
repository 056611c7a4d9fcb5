"""One call of an operator, and how to make variants of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.declaration import REFERENCES, Arguments
from ascend_attn_ops.reference.operators.flash_attention_score import with_defaults

Outputs = tuple[Tensor, ...]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Returns the outputs as a tuple, although one output is a tensor and none is None."""
    if outputs is None:
        return ()
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def named_tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor by its argument's name; those of a list as ``name[0]``, ``name[1]``, ..."""
    named: dict[str, Tensor] = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            named[name] = x
        elif isinstance(x, list | tuple):
            named |= {f"{name}[{i}]": item for i, item in enumerate(x) if isinstance(item, Tensor)}
    return named


# Operators whose functions take lengths on the host, and the names of these.
BY_HOST = (
    "flash_attention_score",
    "_flash_attention_score",
    "prompt_flash_attention",
    "fused_infer_attention_score",
    "sparse_lightning_indexer_grad_kl_loss",
)
LENGTHS_ON_HOST = ("prefix", "actual_seq_lengths_query", "actual_seq_lengths_key")


def lengths(values: Iterable[int]) -> Tensor:
    """Lengths of sequences, on the host."""
    return torch.tensor(list(values), dtype=torch.int64)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of the elements, for comparisons in which a NaN equals itself."""
    # One element is contiguous with any stride.
    return x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


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
        return named_tensors(self.arguments)

    def tensor_names(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """The names of tensors among `wanted`: a list's name stands for its tensors."""
        names = set(wanted)
        return tuple(name for name in self.tensors if names & {name, name.partition("[")[0]})

    def call(self, namespace: Any) -> tuple[Tensor, ...]:
        """Runs the operator of `namespace`: torch.ops.ascend, or the references."""
        return as_tuple(getattr(namespace, self.operator)(*self.args, **self.options))

    def replace(self, **changes: Any) -> Sample:
        """Other arguments, or other tensors of a list: ``replace(**{"name[0]": tensor})``."""
        arguments = self.arguments
        for name, x in changes.items():
            argument, _, index = name.partition("[")
            assert argument in arguments, f"the sample of {self.operator} has no {argument}"
            if index:
                items = list(arguments[argument])
                items[int(index.rstrip("]"))] = x
                x = items
            arguments[argument] = x
        return replace(
            self,
            inputs={name: arguments[name] for name in self.inputs},
            options={name: arguments[name] for name in self.options},
        )

    def given(self, **changes: Any) -> Sample:
        """As `replace`, and also for arguments that the sample leaves at their defaults."""
        new = {name: x for name, x in changes.items() if name not in self.arguments}
        return replace(self, options={**self.options, **new}).replace(**changes)

    def of_gradient(self, **saved: Tensor) -> Sample:
        """The gradient operator's call: the same arguments, and tensors of the forward's."""
        return replace(self, operator=f"{self.operator}_grad", inputs={**self.inputs, **saved})

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """A tensor that is passed twice (key as value) stays one tensor."""
        mapped: dict[int, Tensor] = {}
        for x in self.tensors.values():
            if id(x) not in mapped:
                mapped[id(x)] = function(x)
        return self.replace(**{name: mapped[id(x)] for name, x in self.tensors.items()})

    def scaled(self, factor: float) -> Sample:
        """Other values. Statistics stay: no row has a factor of them."""
        scaled = self.map(lambda x: (x * factor).to(x.dtype) if x.is_floating_point() else x)
        statistics = {name: x for name, x in self.tensors.items() if name.startswith("softmax_")}
        return scaled.replace(**statistics)

    def double(self) -> Sample:
        return self.map(lambda x: x.double() if x.is_floating_point() else x)

    def exact_arguments(self) -> Arguments:
        """Returns all arguments in float64, including defaults."""
        exact = self.double()
        bound = signature(getattr(reference, self.operator)).bind(*exact.args, **exact.options)
        bound.apply_defaults()
        arguments = Arguments(**bound.arguments)
        return with_defaults(arguments) if hasattr(arguments, "num_heads") else arguments

    def to(self, device: str) -> Sample:
        return self.map_to_device(lambda x: x.to(device))

    def map_to_device(self, move: Callable[[Tensor], Tensor]) -> Sample:
        """Lengths that are read on the host stay there."""
        moved = self.map(move)
        if not self.operator.startswith(BY_HOST):
            return moved
        stay = {name: self.options[name] for name in LENGTHS_ON_HOST if name in self.options}
        return moved.replace(**stay)

    def copied_to(self, device: str) -> Sample:
        """With what lies between the elements of its tensors, which "Nct" reads."""

        def copy(x: Tensor) -> Tensor:
            whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
            whole = whole.to(device, copy=True)
            return whole.as_strided(x.shape, x.stride(), x.storage_offset())

        return self.map_to_device(copy)

    def clone(self) -> Sample:
        return self.map(Tensor.clone)

    def requires_grad(self, names: Iterable[str]) -> Sample:
        """Leaves of their own for `tensor_names(names)`; everything else is detached."""
        wanted = {id(self.tensors[name]) for name in self.tensor_names(names)}
        return self.map(lambda x: x.detach().clone().requires_grad_(id(x) in wanted))

    def strided(self) -> Sample:
        """The same values with gaps between the elements, filled with what would be noticed."""
        return self.map(lambda x: torch.stack((x, torch.full_like(x, noticed(x))), -1)[..., 0])

    def transposed(self) -> Sample:
        """The same values with the dimensions in memory in reverse order."""

        def reversed_axes(x: Tensor) -> Tensor:
            return x.permute(tuple(reversed(range(x.dim()))))

        return self.map(lambda x: reversed_axes(reversed_axes(x).contiguous()))


def noticed(x: Tensor) -> float:
    """Returns a value that would show if it were read with x: NaN, or an index out of range."""
    if x.is_floating_point():
        return torch.nan
    return {torch.bool: 1, torch.uint8: 255, torch.int8: 127}.get(x.dtype, 2**30)


def sample_of(operator: str, id: str, arguments: Mapping[str, Any]) -> Sample:
    """Build a sample from the named arguments of a file.

    Raises:
        ValueError: there is no such operator or argument, or a positional argument is missing.
    """
    if operator not in REFERENCES:
        raise ValueError(f"there is no operator {operator!r}")
    schema = getattr(torch.ops.ascend, operator).default._schema.arguments
    if unknown := arguments.keys() - {x.name for x in schema}:
        raise ValueError(f"{operator} has no argument {', '.join(sorted(unknown))}")
    positional = [x.name for x in schema if not x.kwarg_only]
    if missing := [name for name in positional if name not in arguments]:
        raise ValueError(f"{operator} needs an argument {', '.join(missing)}")
    return Sample(
        operator,
        id,
        {name: arguments[name] for name in positional},
        {name: x for name, x in arguments.items() if name not in positional},
    )
