"""Counts the operators that torch runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts them by name; results that a checkpoint keeps do not run again."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
