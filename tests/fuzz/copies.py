"""The memory that a call gets: copies of it, and whether a call changed it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from ascend_attn_ops._core.arguments import tensors_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_MOST_ELEMENTS = 2**24
# The largest storage that every case copies.
_MOST_BYTES = 2**20


def has_memory(x: Tensor) -> bool:
    """Whether its elements are what lies in a storage."""
    return (
        x.layout is torch.strided
        and x.is_cpu
        and not (x.is_nested or x.is_quantized or x._is_zerotensor())
        and not isinstance(x, FakeTensor)
    )


def can_be_read(x: Tensor) -> bool:
    """Returns whether torch can copy x: it reads freed memory, and copies every element."""
    if not has_memory(x) or x.numel() > _MOST_ELEMENTS:
        return False
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    end = x.storage_offset() + last + 1
    return not x.numel() or end * x.itemsize <= x.untyped_storage().nbytes()


def storage_bytes(x: Tensor) -> Tensor:
    """All bytes of the storage, also those that `x` does not show."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


class Before:
    """Remembers the memory and the metadata of a call's tensors."""

    def __init__(self, arguments: object) -> None:
        # A long list repeats a tensor.
        every = {id(x): x for x in tensors_in(as_lists(arguments))}
        self._tensors = [x for x in every.values() if has_memory(x)]
        self._bytes = [storage_bytes(x).clone() for x in self._tensors]
        self._state = [_state(x) for x in self._tensors]

    def changed(self, written: Iterable[Tensor] = ()) -> Tensor | None:
        """Returns a tensor that has changed; `written` tensors may, within their own elements."""
        may_change = [x for x in written if isinstance(x, Tensor) and has_memory(x)]
        storages = {x.untyped_storage()._cdata for x in may_change}
        for x, before, state in zip(self._tensors, self._bytes, self._state, strict=True):
            now = storage_bytes(x)
            if x.untyped_storage()._cdata in storages:
                before = _with_elements(before, x, may_change)
            elif state != _state(x):
                return x
            if not torch.equal(now, before):
                return x
        return None


def _state(x: Tensor) -> tuple[object, ...]:
    # Inference tensors have no version counter.
    version = -1 if x.is_inference() else x._version
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.requires_grad, version


def _with_elements(before: Tensor, x: Tensor, written: Iterable[Tensor]) -> Tensor:
    """Returns the old bytes, with the new ones where elements of written tensors are."""
    expected = before.clone()
    for y in written:
        if y.untyped_storage()._cdata == x.untyped_storage()._cdata:
            _in_storage(expected, y).copy_(y.detach())
    return expected


def _in_storage(buffer: Tensor, like: Tensor) -> Tensor:
    x = torch.empty(0, dtype=like.dtype)
    return x.set_(buffer.untyped_storage(), like.storage_offset(), like.shape, like.stride())


class Once:
    """An iterator over a list, which its copy starts again."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
        self._rest = iter(self.items)

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self._rest)

    def __repr__(self) -> str:
        # The library's and torch's errors show it: torch cannot print a tensor without memory.
        return f"iter of {len(self.items)}"


def as_lists(x: Any) -> Any:
    """The same with lists for iterators."""
    if isinstance(x, dict):
        return {name: as_lists(item) for name, item in x.items()}
    return list(x.items) if isinstance(x, Once) else x


def twin(x: Any, storages: dict[int, Tensor] | None = None) -> Any:
    """Copies of all tensors, which lie in memory, and share it, as the others do."""
    storages = {} if storages is None else storages
    if isinstance(x, dict):
        return {name: twin(item, storages) for name, item in x.items()}
    if isinstance(x, Once):
        return Once(twin(x.items, storages))
    if isinstance(x, (list, tuple)) and len(x) < 200 and not isinstance(x, torch.Size):
        return type(x)(twin(item, storages) for item in x)
    if not isinstance(x, Tensor) or not has_memory(x):
        return x
    if x.untyped_storage().nbytes() > _MOST_BYTES:
        # A compressed mask, which nothing writes to: `Before` would show it.
        return x
    key = x.untyped_storage()._cdata
    if key not in storages:
        storages[key] = storage_bytes(x).clone()
    with torch.inference_mode(x.is_inference()):
        copy = _in_storage(storages[key], x)
    # Memory that was freed, which torch has allocated.
    storages[key].untyped_storage().resize_(x.untyped_storage().nbytes())
    if x.is_neg():
        copy = torch._neg_view(copy)
    return copy.requires_grad_(x.requires_grad)
