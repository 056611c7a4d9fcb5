"""Lists the operators and overloads of torch.ops.ascend."""

from __future__ import annotations

import torch


def overloads() -> dict[str, set[str]]:
    """The overloads of every operator, by its name: "" is the operator itself."""
    found: dict[str, set[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("ascend::"):
            operator, _, overload = name.removeprefix("ascend::").partition(".")
            found.setdefault(operator, set()).add(overload)
    return found


# All operators, including those that only autograd calls.
OPERATORS = frozenset(overloads())
