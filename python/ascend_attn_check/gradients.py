"""Gradients of a sample through autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from ascend_attn_ops.reference.call import Sample, as_tuple
from torch import Tensor

from ascend_attn_check.samples import OPERATORS

Outputs = tuple[Tensor, ...]


def through_torch(sample: Sample) -> Any:
    return sample.call(torch.ops.ascend)


def differentiable_names(sample: Sample) -> tuple[str, ...]:
    if any(sample.arguments.get(x) is not None for x in ("layout_key", "layout_kv")):
        return ()  # paged keys are for inference
    return sample.tensor_names(OPERATORS[sample.operator].differentiable)


def incoming_gradients(sample: Sample, outputs: Outputs) -> Outputs:
    """One for each output that carries the gradient."""
    operator = OPERATORS[sample.operator]
    assert operator.gradient is not None
    incoming = operator.gradient.incoming
    return tuple(incoming(sample, outputs, x) for x in operator.gradient_outputs(outputs))


def gradients(
    sample: Sample,
    names: Iterable[str] | None = None,
    call: Callable[[Sample], Any] = through_torch,
) -> Outputs:
    """With respect to these tensors, or to all that the operator differentiates."""
    return outputs_and_gradients(sample, names, call)[1]


def outputs_and_gradients(
    sample: Sample,
    names: Iterable[str] | None = None,
    call: Callable[[Sample], Any] = through_torch,
) -> tuple[Outputs, Outputs]:
    operator = OPERATORS[sample.operator]
    names = differentiable_names(sample) if names is None else tuple(names)
    leaf = sample.requires_grad(names)
    outputs = as_tuple(call(leaf))
    if not names:
        return outputs, ()
    leaves = [leaf.tensors[name] for name in names]
    d_outputs = incoming_gradients(sample, outputs)
    results = torch.autograd.grad(operator.gradient_outputs(outputs), leaves, d_outputs)
    return tuple(x.detach() for x in outputs), results
