"""The operators as the public functions call them: all arguments of the schema, in its order.

To find its arguments in the schema takes torch.ops longer than a small operator runs. Plain ones go
straight to the dispatcher (csrc/direct_call.h); all others, and what torch.compile traces, go
through torch.ops.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C


def _through_torch(name: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.ascend, name).default
    arguments = overload._schema.arguments
    keywords = [argument.name for argument in arguments if argument.kwarg_only]
    positional = len(arguments) - len(keywords)

    def call(*args: Any) -> Any:
        return overload(*args[:positional], **dict(zip(keywords, args[positional:], strict=True)))

    return call


_traceable = SimpleNamespace(**{name: _through_torch(name) for name in _C.direct_calls})
_direct = SimpleNamespace(
    **{name: make(getattr(_traceable, name), __name__) for name, make in _C.direct_calls.items()}
)


def operators() -> Any:
    """Every operator by its name."""
    return _traceable if is_dynamo_compiling() else _direct
