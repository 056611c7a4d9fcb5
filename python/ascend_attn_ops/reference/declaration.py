"""References take the arguments of their operators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from ascend_attn_ops._operators import schema_parameters

Result = TypeVar("Result")

# By the names of their operators.
REFERENCES: dict[str, Callable[..., Any]] = {}


class Arguments(SimpleNamespace):
    """All arguments of a call, by name."""


def reference(compute: Callable[[Arguments], Result]) -> Callable[..., Result]:
    """Make a function of `Arguments` the reference of the operator of its name."""
    signature = inspect.Signature(list(schema_parameters(compute.__name__).values()))

    @functools.wraps(compute)
    def call(*args: Any, **kwargs: Any) -> Result:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return compute(Arguments(**arguments.arguments))

    vars(call)["__signature__"] = signature
    REFERENCES[compute.__name__] = call
    return call
