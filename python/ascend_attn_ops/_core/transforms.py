"""torch.func: grad, vjp, vmap and what is made of them.

The transforms do not know autograd functions of C++. While one of them runs, and only then, the
dispatcher calls the kernels registered here, which give it an autograd function of Python for
every operator that has a gradient. Its backward runs the operator again, through the gradient that
it has in C++, and vmap calls it once for each example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.device_limits import LimitsOfCall
from ascend_attn_ops._core.torch_private import (
    FunctionalizeInterpreter,
    FunctorchFunctionalizeAPI,
    TreeSpec,
    retrieve_current_functorch_interpreter,
    tree_flatten,
    tree_unflatten,
)

_library = torch.library.Library("ascend", "IMPL")


@dataclass(frozen=True)
class _Call:
    """A call without its arguments, which the functions below take one by one.

    Its gradient runs the operator again, maybe elsewhere: with the autocast and limits of the call.
    """

    operator: Any
    arguments: TreeSpec
    device: str
    autocast: torch.dtype | None
    limits: int
    # The positions of the flattened arguments to differentiate: for a gradient only.
    wanted: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return str(self.operator._schema.name)

    def run(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        args, kwargs = tree_unflatten(arguments, self.arguments)
        with self._settings():
            outputs = self.operator(*args, **kwargs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with LimitsOfCall(self.limits):
            if is_autocast_available(self.device):
                with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
                    yield
            else:
                yield


def _call_of(operator: Any, arguments: Sequence[Any], spec: TreeSpec) -> _Call:
    device = next((x.device.type for x in arguments if isinstance(x, Tensor)), "cpu")
    autocast = None
    if is_autocast_available(device) and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    return _Call(operator, spec, device, autocast, _C.limits_override())


def _for_each_example(
    function: type[torch.autograd.Function],
    info: Any,
    in_dims: Sequence[Any],
    inputs: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    if info.batch_size == 0:
        raise wrong(ValueError, inputs[0].name, "vmap", "at least one example", "none")
    results = [
        function.apply(
            *(
                x if dim is None else x.select(dim, example)
                for x, dim in zip(inputs, in_dims, strict=True)
            )
        )
        for example in range(info.batch_size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return outputs, (0,) * len(outputs)


def _refuse_tangents(name: str) -> NoReturn:
    expected = "tensors without forward-mode tangents, which this operator has no rule for"
    raise wrong(NotImplementedError, name, "gradient", expected, "a dual tensor")


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *arguments: Any) -> tuple[Tensor, ...]:
        return call.run(arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *arguments = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        ctx.save_for_backward(*(x for x in arguments if isinstance(x, Tensor)))
        ctx.arguments = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.tensors = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = list(ctx.arguments)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            arguments[i] = tensor
        wanted = tuple(i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        call = replace(ctx.call, wanted=wanted)
        gradients = iter(_Gradient.apply(call, *arguments, *d_outputs))
        return None, *(next(gradients) if i in wanted else None for i in range(len(arguments)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        _refuse_tangents(ctx.call.name)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        return _for_each_example(_Operator, info, in_dims, inputs)


class _Gradient(torch.autograd.Function):
    """The gradients of `call.wanted`, from all arguments of the call and all incoming gradients."""

    @staticmethod
    def forward(call: _Call, *inputs: Any) -> tuple[Tensor, ...]:
        arguments = list(inputs[: call.arguments.num_leaves])
        with torch.enable_grad():
            for i in call.wanted:
                arguments[i] = arguments[i].detach().requires_grad_()
            outputs = call.run(arguments)
        incoming = inputs[len(arguments) :]
        pairs = [
            (output, d_output)
            for output, d_output in zip(outputs, incoming, strict=True)
            if output.requires_grad and d_output is not None
        ]
        leaves = [arguments[i] for i in call.wanted]
        if not pairs:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        outputs, d_outputs = zip(*pairs, strict=True)
        return torch.autograd.grad(
            outputs, leaves, d_outputs, allow_unused=True, materialize_grads=True
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
        got = "a second derivative, which this operator does not have"
        raise wrong(NotImplementedError, ctx.name, "gradient", "a first derivative", got)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        _refuse_tangents(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        return _for_each_example(_Gradient, info, in_dims, inputs)


def _below(functionalize: FunctorchFunctionalizeAPI, operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator under torch.func.functionalize, which knows no autograd functions."""
    args, kwargs = functionalize.unwrap_tensors((args, kwargs))
    with functionalize.redispatch_to_next():
        outputs = operator(*args, **kwargs)
    return functionalize.wrap_tensors(outputs)


def _register(name: str) -> None:
    operator = getattr(torch.ops.ascend, name).default
    returns_one = len(operator._schema.returns) == 1

    def kernel(*args: Any, **kwargs: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        if isinstance(interpreter, FunctionalizeInterpreter):
            return _below(FunctorchFunctionalizeAPI(interpreter), operator, args, kwargs)
        arguments, spec = tree_flatten((args, kwargs))
        call = _call_of(operator, arguments, spec)
        outputs = cast("tuple[Tensor, ...]", _Operator.apply(call, *arguments))
        return outputs[0] if returns_one else outputs

    _library.impl(name, kernel, "FuncTorchDynamicLayerFrontMode")


for _name in _C.direct_calls:
    # Inference operators work as they are, or refuse gradients as they do without transforms.
    if _name not in _C.inference_operators:
        _register(_name)
