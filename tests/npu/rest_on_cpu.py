"""Everything but our operators on the CPU: the simulation lacks what a model needs beside them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def is_npu(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == "npu"


def flat(tensor: Tensor) -> Tensor:
    """The whole storage: the simulation copies dense tensors without any kernel."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((elements,), (1,), 0)


def moved(tensor: Tensor, device: str) -> Tensor:
    """On another device, with its strides and with what lies around it."""
    return (
        flat(tensor).to(device).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    )


def zip_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of the schema that were given, with their values."""
    parameters = func._schema.arguments
    named = {parameter.name: parameter for parameter in parameters}
    return [
        *zip(parameters, args, strict=False),
        *((named[name], value) for name, value in kwargs.items()),
    ]


def matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """torch_npu differentiates a whole matmul; the CPU, its parts, without an operator for it."""

    def gradients() -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (self, other)]
        return torch.autograd.grad(inputs[0] @ inputs[1], inputs, grad)

    # In a mode autograd has been left behind; on another thread it has not.
    with ThreadPoolExecutor(1) as thread:
        both = thread.submit(gradients).result()
    return tuple(x if wanted else None for x, wanted in zip(both, mask, strict=True))


# These read what only an NPU tensor has.
ABOUT_THE_NPU = {"npu::get_npu_format"}

CPU_SUBSTITUTES = {torch.ops.aten.matmul_backward.default: matmul_backward}


class RestOnCPU(TorchDispatchMode):
    """Runs every operator of torch that computes on copies on the CPU, and brings back the results.

    Ours run on the NPU, and so do views, which are not computed. `called` counts ours.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ascend":
            self.called[func.__name__] = self.called.get(func.__name__, 0) + 1
            return func(*args, **kwargs)
        asked = kwargs.get("device")
        wants_npu = asked is not None and torch.device(asked).type == "npu"
        given_npu = any(map(is_npu, tree_leaves((args, kwargs))))
        reads_the_tensor = func.is_view or func._schema.name in ABOUT_THE_NPU
        if reads_the_tensor or not (wants_npu or given_npu):
            return func(*args, **kwargs)
        return self.compute(func, args, kwargs, wants_npu or (given_npu and asked is None))

    @staticmethod
    def compute(
        func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], to_npu: bool
    ) -> Any:
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def to_cpu(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu")
            if not is_npu(x):
                return x
            if id(x) not in copies:
                copies[id(x)] = x, moved(x, "cpu")
            return copies[id(x)][1]

        cpu_args, cpu_kwargs = tree_map(to_cpu, (args, kwargs))
        result = CPU_SUBSTITUTES.get(func, func)(*cpu_args, **cpu_kwargs)
        for argument, given in zip_arguments(func, args, kwargs):
            if argument.is_write:
                for original in filter(is_npu, tree_leaves(given)):
                    flat(original).copy_(flat(copies[id(original)][1]))
        originals = {id(copy): original for original, copy in copies.values()}

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in originals:
                return originals[id(x)]
            return moved(x, "npu") if to_npu else x

        return tree_map(back, result)
