"""The calls of the operators within a block, as they pass torch's dispatcher."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import tensors_in
from ascend_attn_ops._core.torch_private import FakeTensor, TorchDispatchMode
from ascend_attn_ops.reference.bounds import BOUNDS
from ascend_attn_ops.reference.call import Sample

_PACKAGE, _TORCH = (f"{x}{os.sep}" for x in (Path(__file__).parents[1], torch.__path__[0]))


@dataclass(frozen=True)
class Call:
    """A call of an operator: its arguments, and the line of the program that made it."""

    sample: Sample
    place: str

    def __str__(self) -> str:
        return f"{self.sample.operator} at {self.place}"


class CallObserver(TorchDispatchMode):
    """Sees each call of an operator in its block: forward and gradient, eager or compiled.

    `backward()` inside the block is seen too, on whichever thread autograd runs it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch 2.13 and later compile and run compiled code in the block."""
        return True

    @abstractmethod
    def observe(self, call: Call, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, which calls the operator."""

    def __enter__(self) -> Any:
        self._refuse_capture()
        return super().__enter__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("ascend::")
        if func.namespace != "ascend" or name not in BOUNDS:
            return func(*args, **kwargs)
        if any(isinstance(x, FakeTensor) or x.is_meta for x in tensors_in([args, dict(kwargs)])):
            return func(*args, **kwargs)
        if any(_unpacks(x) for x in tensors_in([args, dict(kwargs)])):
            return NotImplemented  # a DTensor makes a call of its local tensors
        self._refuse_capture()
        call = Call(_sample(name, func, args, kwargs), _place(sys._getframe().f_back))
        return self.observe(call, lambda: func(*args, **kwargs))

    def _refuse_capture(self) -> None:
        npu = getattr(torch, "npu", None)
        if npu is not None and npu.is_initialized() and npu.is_current_stream_capturing():
            text = "a capture of a graph cannot wait for the device; leave it out of the block"
            raise RuntimeError(f"{self._name}: {text}")


def _unpacks(x: Tensor) -> bool:
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _sample(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sample:
    """With all arguments, and of the form that returns its outputs."""
    given = {**dict(zip((x.name for x in func._schema.arguments), args, strict=False)), **kwargs}
    inputs: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for x in getattr(torch.ops.ascend, name).default._schema.arguments:
        # torch leaves out what has its default.
        value = given.get(x.name, x.default_value)
        (options if x.kwarg_only else inputs)[x.name] = value
    return Sample(name, "", inputs, options)


def _place(frame: FrameType | None) -> str:
    """The innermost line that is neither of this package nor of torch."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, _TORCH, "<")):
            return f"{_relative(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward"  # in a thread of autograd


def _relative(file: str) -> str:
    """Returns the path below the working directory; for files elsewhere, the name alone."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name
