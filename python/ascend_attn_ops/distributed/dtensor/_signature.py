"""The arguments of an operator, and the tensors among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Signature:
    """An operator's arguments, in the order of its schema."""

    def __init__(self, overload: Any) -> None:
        arguments = overload._schema.arguments
        self.overload = overload
        self.name: str = overload._schema.name.removeprefix("ascend::")
        self.names = [x.name for x in arguments]
        self.index = {name: index for index, name in enumerate(self.names)}
        self.defaults = [x.default_value if x.has_default_value() else None for x in arguments]
        self.positional = sum(not x.kwarg_only for x in arguments)
        self.written = {x.name for x in arguments if x.is_write}

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        values = list(self.defaults)
        values[: len(args)] = args
        for name, value in kwargs.items():
            values[self.index[name]] = value
        return values

    def call(self, values: Sequence[Any]) -> Any:
        keywords = dict(zip(self.names[self.positional :], values[self.positional :], strict=True))
        return self.overload(*values[: self.positional], **keywords)

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, with numbers for symbolic ones."""
        return {name: _number(value) for name, value in zip(self.names, values, strict=True)}


def _number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_number(item) for item in value]
    return int(value) if isinstance(value, torch.SymInt) else value


def sizes_of(x: Tensor) -> tuple[int, ...]:
    """The shape, in numbers where torch.compile has made it symbolic."""
    return tuple(map(int, x.shape))


def as_list(results: Any) -> list[Tensor]:
    if results is None:
        return []
    return [results] if isinstance(results, Tensor) else list(results)


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
