"""What turns a function of this package into kernels of an operator of torch_npu.

A function takes, by name, those arguments of the schema that it can follow. Every other argument
must have the default that the schema gives it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ascend_attn_ops._arguments import shown
from ascend_attn_ops._torch import has_kernel, is_fake, without_autocast

F = TypeVar("F", bound=Callable[..., Any])


class Kernel(NamedTuple):
    """How an operator is computed.

    Attributes:
        name: qualified, "npu::npu_swiglu".
        function: takes arguments of the schema as keywords.
        without_effect: arguments that change nothing but the way to the same result.
        autograd: what is called with the same arguments where autograd records; None for operators
            that torch_npu does not differentiate.
    """

    name: str
    function: Callable[..., Any]
    without_effect: tuple[str, ...]
    autograd: Callable[..., Any] | None

    @property
    def followed(self) -> frozenset[str]:
        """The arguments that the function takes."""
        return frozenset(inspect.signature(self.function).parameters)


KERNELS: dict[str, Kernel] = {}


def computes(
    name: str, *, without_effect: tuple[str, ...] = (), differentiable: bool = False
) -> Callable[[F], F]:
    """Make the decorated function the kernel of an operator, of torch.ops.npu unless qualified.

    `differentiable`: it consists of differentiable operators, so that autograd records these.
    """

    def add(function: F) -> F:
        qualified = name if "::" in name else f"npu::{name}"
        autograd = function if differentiable else None
        KERNELS[qualified] = Kernel(qualified, function, without_effect, autograd)
        return function

    return add


def differentiates(name: str) -> Callable[[F], F]:
    """Make the decorated function what autograd records of an operator of torch.ops.npu, whose
    kernel `computes` has named."""

    def add(function: F) -> F:
        qualified = f"npu::{name}"
        KERNELS[qualified] = KERNELS[qualified]._replace(autograd=function)
        return function

    return add


def unsupported(name: str, argument: str, expected: str, got: object) -> NotImplementedError:
    """For what the operator of torch_npu takes and this library does not compute."""
    return NotImplementedError(f"{name}: {argument}: expected {expected}, got {shown(got)}")


def has_values(tensor: Tensor) -> bool:
    """Whether the elements of a tensor can be read: neither it nor what is made now is fake."""
    return not (tensor.is_meta or is_fake(tensor) or is_fake(torch.empty(0)))


def register(library: torch.library.Library, kernel: Kernel, schema: torch.FunctionSchema) -> None:
    """Register the kernels of an operator for the CPU and, unless torch_npu has one, for Meta.

    torch_npu's own kernels, which fake tensors on an NPU use as well, stay as they are.
    """
    call = with_checked_arguments(kernel, kernel.function, schema)

    def below_autograd(*args: Any, **kwargs: Any) -> Any:
        with below_autograd():
            return call(*args, **kwargs)

    operator = kernel.name.partition("::")[2]
    backends = ["CPU"]
    if not has_kernel(kernel.name, "Meta"):
        backends.append("Meta")
    for backend in backends:
        library.impl(operator, below_autograd, backend)
        # The others keep what torch does for operators that nobody differentiates, as on the NPU.
        if kernel.autograd is not None:
            recorded = with_checked_arguments(kernel, kernel.autograd, schema)
            library.impl(operator, recorded, f"Autograd{backend}")


def with_checked_arguments(
    kernel: Kernel, function: Callable[..., Any], schema: torch.FunctionSchema
) -> Callable[..., Any]:
    """`function`, called by the dispatcher with the arguments of this schema, gets those that the
    kernel's function takes."""
    followed = kernel.followed
    parameters = schema.arguments
    names = [parameter.name for parameter in parameters]
    defaults = {x.name: x.default_value for x in parameters if x.has_default_value()}
    ignored = set(kernel.without_effect)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        given: dict[str, Any] = {}
        for name, value in values.items():
            default = defaults.get(name)
            # `str? layout="BSND"`: None stands for the default.
            value = default if value is None else value
            if name in followed:
                given[name] = value
            elif name not in ignored and (isinstance(value, Tensor) or value != default):
                raise unsupported(
                    kernel.name, name, f"{default!r}, all that is computed here", value
                )
        # Mixed dtypes are an error on the device, autocast or not.
        with without_autocast():
            return function(**given)

    return call
