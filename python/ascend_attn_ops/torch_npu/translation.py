"""Makes kernels of an operator of others from a row of the table (`table.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import shown, wrong
from ascend_attn_ops._core.operators import signature_of
from ascend_attn_ops._core.torch_private import (
    below_autograd,
    has_kernel,
    without_autocast,
)

# Their arguments by this library's names, in all operators.
NAMES = {
    "actual_seq_klen": "actual_seq_lengths_key",
    "actual_seq_kvlen": "actual_seq_lengths_key",
    "actual_seq_lengths": "actual_seq_lengths_query",
    "actual_seq_lengths_kv": "actual_seq_lengths_key",
    "actual_seq_qlen": "actual_seq_lengths_query",
    "cmp_residual_k": "cmp_residual_key",
    "compress_seq_offsets": "compress_seq_offset",
    "dequant_scale_key": "key_antiquant_scale",
    "dequant_scale_value": "value_antiquant_scale",
    "dropout_mask": "drop_mask",
    "head_num": "num_heads",
    "input_layout": "layout",
    "k": "key",
    "layout_k": "layout_key",
    "layout_q": "layout",
    "layout_query": "layout",
    "learnable_sink": "sink",
    "mask_mode": "sparse_mode",
    "next_tockens": "next_tokens",
    "num_query_heads": "num_heads",
    "pre_tockens": "pre_tokens",
    "pse": "pse_shift",
    "q": "query",
    "return_value": "return_values",
    "scale": "scale_value",
    "sinks": "sink",
    "slot_indices": "slot_mapping",
    "softmax_lse_flag": "return_softmax_lse",
    "softmax_scale": "scale_value",
    "topk": "sparse_count",
    "w": "weights",
}


@dataclass(frozen=True)
class Translation:
    """How an operator of others is computed.

    An argument is followed if `ours` has a parameter of its name, translated by `names`, or else by
    `NAMES`. Any other has to have the default of the schema, unless it is in `without_effect`.

    Attributes:
        name: qualified, "npu::npu_swiglu".
        ours: an operator of torch.ops.ascend by its name, or a function. The parameters are looked
            up here; a parameter `name` of a function gets `name`, and one of any names all others.
        compute: what is called instead of `ours`, with the same arguments, and with those of its
            own parameters that `ours` lacks.
        names: its arguments that have another name in `ours`.
        only: the values that alone are computed, by its argument.
        without_effect: arguments that change nothing but the way to the same result.
        differentiable: whether it consists of differentiable operators, which autograd records.
            Otherwise the operator has no gradient, as in torch_npu.
    """

    name: str
    ours: str | Callable[..., Any]
    compute: Callable[..., Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Sequence[object]] = field(default_factory=dict)
    without_effect: Sequence[str] = ()
    differentiable: bool = False

    @cached_property
    def function(self) -> Callable[..., Any]:
        if self.compute is not None:
            return self.compute
        return getattr(torch.ops.ascend, self.ours) if isinstance(self.ours, str) else self.ours

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names of the arguments that `function` takes."""
        signature = signature_of if isinstance(self.ours, str) else inspect.signature
        own = inspect.signature(self.compute).parameters if self.compute else {}
        return frozenset(signature(self.ours).parameters) | frozenset(own)  # type: ignore[arg-type]

    @cached_property
    def takes_all(self) -> bool:
        """Whether every argument is one of `ours`."""
        own = {} if isinstance(self.ours, str) else inspect.signature(self.ours).parameters
        return any(x.kind is x.VAR_KEYWORD for x in own.values())

    def our_name(self, argument: str) -> str:
        return self.names.get(argument) or NAMES.get(argument, argument)

    def follows(self, argument: str) -> bool:
        known = self.takes_all or self.our_name(argument) in self.parameters
        return known or argument in self.only

    def check(self, argument: str, value: Any, default: Any) -> None:
        """Refuses a value that would have no effect although torch_npu documents one."""
        if argument in self.only:
            if value not in self.only[argument]:
                values = ", ".join(map(str, self.only[argument]))
                expected = values if len(self.only[argument]) == 1 else f"one of {values}"
                raise unsupported(self.name, argument, expected, value)
        elif self.follows(argument) or argument in self.without_effect:
            return
        elif isinstance(value, Tensor) or value != default:
            expected = f"{default!r}, all that is computed here"
            raise unsupported(self.name, argument, expected, value)

    def translated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        ours = {self.our_name(argument): x for argument, x in arguments.items()}
        own = {"name": self.name, **ours}
        return {name: x for name, x in own.items() if self.takes_all or name in self.parameters}


def unsupported(name: str, argument: str, expected: str, got: object) -> NotImplementedError:
    """For what the operator takes and this library does not compute."""
    return wrong(NotImplementedError, name, argument, expected, shown(got))


def register(
    library: torch.library.Library, translation: Translation, schema: torch.FunctionSchema
) -> None:
    """Register the kernels of an operator for the CPU and, unless its owner has one, for Meta.

    The owner's kernels, which fake tensors on an NPU use as well, stay as they are.
    """
    defaults = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
    names = [x.name for x in schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        for argument, value in arguments.items():
            # `str? layout="BSND"`: None stands for the default.
            if value is None:
                arguments[argument] = defaults.get(argument)
            translation.check(argument, arguments[argument], defaults.get(argument))
        # Mixed dtypes are an error on the device, autocast or not.
        with without_autocast():
            return translation.function(**translation.translated(arguments))

    def call_below_autograd(*args: Any, **kwargs: Any) -> Any:
        with below_autograd():
            return call(*args, **kwargs)

    operator = translation.name.partition("::")[2]
    backends = ["CPU"] if has_kernel(translation.name, "Meta") else ["CPU", "Meta"]
    if not any(str(x.type) in ("Tensor", "List[Tensor]") for x in schema.arguments):
        backends = ["CompositeExplicitAutograd"]  # it may be called without a tensor
    for backend in backends:
        library.impl(operator, call_below_autograd, backend)
        # The others keep what torch does for operators that nobody differentiates, as on the NPU.
        if translation.differentiable:
            library.impl(operator, call, f"Autograd{backend}")
