"""Changes to what others own: undone in reverse order, and only where they are still ours."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import Any


class Patch:
    """Changes that an error in its block undoes at once, and `undo` later.

    A later change by someone else stays. A copy, as of a model, undoes its own.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        with ExitStack() as stack:
            for step in self._steps:
                stack.callback(step)
            self._steps = []

    def on_undo(self, step: Callable[..., object], *arguments: Any) -> None:
        self._steps.append(partial(step, *arguments))

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        before = [vars(owner)[name]] if name in vars(owner) else []
        setattr(owner, name, value)
        self.on_undo(_restore_attribute, owner, name, value, before)

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        before = [mapping[key]] if key in mapping else []
        mapping[key] = value
        self.on_undo(_restore_item, mapping, key, value, before)


def _restore_attribute(owner: Any, name: str, value: Any, before: list[Any]) -> None:
    if vars(owner).get(name, owner) is value:
        setattr(owner, name, before[0]) if before else delattr(owner, name)


def _restore_item(
    mapping: MutableMapping[Any, Any], key: Any, value: Any, before: list[Any]
) -> None:
    if mapping.get(key, mapping) is value:
        if before:
            mapping[key] = before[0]
        else:
            del mapping[key]
