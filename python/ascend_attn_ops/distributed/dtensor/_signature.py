"""The arguments of an operator, and the tensors among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Signature:
    """An operator's arguments, by name in the order of its schema."""

    def __init__(self, overload: Any) -> None:
        arguments = overload._schema.arguments
        self.overload = overload
        self.name: str = overload._schema.name.removeprefix("ascend::")
        self.defaults = {
            x.name: x.default_value if x.has_default_value() else None for x in arguments
        }
        self.positional = sum(not x.kwarg_only for x in arguments)
        self.written = {x.name for x in arguments if x.is_write}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.defaults, **dict(zip(self.defaults, args, strict=False)), **kwargs}

    def call(self, values: Mapping[str, Any]) -> list[Tensor]:
        """The results of the operator, in a list."""
        arguments = list(values.items())
        results = self.overload(
            *(value for _, value in arguments[: self.positional]),
            **dict(arguments[self.positional :]),
        )
        if results is None:
            return []
        return [results] if isinstance(results, Tensor) else list(results)


def number(value: Any) -> Any:
    """A value of an argument with numbers for symbolic ones."""
    if isinstance(value, list | tuple):
        return [number(item) for item in value]
    return int(value) if isinstance(value, torch.SymInt) else value


def sizes_of(x: Tensor) -> tuple[int, ...]:
    """The shape, in numbers where torch.compile has made it symbolic."""
    return tuple(map(int, x.shape))


def meta_of(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    sizes = sizes_of(x)
    if shape is None or tuple(shape) == sizes:
        strides = tuple(map(int, x.stride()))
        return torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")
    return torch.empty(shape, dtype=x.dtype, device="meta")


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return [function(x) for x in value] if tensors_of(value) else value


def tensors_of(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return list(value)
    return []
