"""The tensors that arrive at the device: a launch makes them of an operator's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.samples import Sample
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_map


@contextmanager
def arrivals(operator: str, argument: str) -> Iterator[list[Tensor | None]]:
    """One argument of every call, in place of its computation, whose outputs are ones."""
    found: list[Tensor | None] = []
    overload = getattr(torch.ops.ascend, operator).default
    names = [x.name for x in overload._schema.arguments if not x.kwarg_only]

    def on_meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, Tensor) else x

    def record(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given[argument]
        found.append(None if x is None else x.clone())
        outputs = overload(*map(on_meta, args), **{k: on_meta(x) for k, x in kwargs.items()})
        return tree_map(lambda x: torch.ones_like(x, device="cpu"), outputs)

    library = Library("ascend", "IMPL")
    override = {"allow_override": True} if torch.__version__ >= (2, 8) else {}
    library.impl(operator, record, "CPU", **override)
    try:
        yield found
    finally:
        library._destroy()


def arriving(sample: Sample, operator: str, argument: str) -> Tensor:
    """That of one call."""
    with arrivals(operator, argument) as found:
        sample.to("npu").call(torch.ops.ascend)
        torch.get_device_module("npu").synchronize()
    (x,) = found
    assert x is not None
    return x
