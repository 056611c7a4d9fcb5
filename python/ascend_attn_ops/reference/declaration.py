"""References take the arguments of their operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor

from ascend_attn_ops._core.operators import signature_of

Result = TypeVar("Result")

# By the names of their operators.
REFERENCES: dict[str, Callable[..., Any]] = {}


class Arguments(SimpleNamespace):
    """All arguments of a call, by name."""


def reference(compute: Callable[[Arguments], Result]) -> Callable[..., Result]:
    """Make a function of `Arguments` the reference of the operator of its name."""
    signature = signature_of(compute.__name__)

    @functools.wraps(compute)
    def call(*args: Any, **kwargs: Any) -> Result:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        for name, x in arguments.arguments.items():
            if name.startswith(("actual_seq_lengths", "prefix")) and isinstance(x, Tensor):
                arguments.arguments[name] = x.tolist()
        return compute(Arguments(**arguments.arguments))

    vars(call)["__signature__"] = signature
    REFERENCES[compute.__name__] = call
    return call
