"""Runs an operator part by part: local queries, and the keys of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_attn_ops._core.device_limits import LimitsOfCall, limits_in_force
from ascend_attn_ops.distributed._guard import without_autocast
from ascend_attn_ops.distributed._layout import GatheredKeys, Layout, Rows, sum_dtype
from ascend_attn_ops.distributed._operations import ONE_TOKEN, SHARED, Operation, Tensors
from ascend_attn_ops.distributed.shards import SequenceShards


class Keys:
    """The keys that an operation reads on this rank, gathered from local ones.

    Some have travelled `ahead`, or all were `gathered` before.
    """

    def __init__(
        self,
        operation: Operation,
        shards: SequenceShards,
        local: Tensors,
        ahead: Mapping[str, GatheredKeys] | None = None,
        *,
        gathered: bool = False,
    ) -> None:
        self._operation = operation
        self.sources = {name: operation.source(shards, name) for name in local}
        self.full = dict(local)
        if gathered:
            return
        ahead = ahead or {}
        # All begin to travel before one is waited for.
        started = {
            name: source.start_gather(local[name])
            for name, source in self.sources.items()
            if isinstance(source, Layout) and name not in ahead
        }
        for name, source in self.sources.items():
            if name in ahead:
                self.full[name] = ahead[name].wait()
            elif isinstance(source, Layout):
                self.full[name] = source.finish_gather(started[name])
            else:
                self.full[name] = source.gather(local[name])

    def seen(self, part: Rows, name: str) -> slice:
        return self.sources[name].seen(part, *self._operation.range(part, name))

    def beside(self, part: Rows, queries: Tensors) -> dict[str, Any]:
        """The tensors of one part, of the local queries."""
        keys = {name: x[self.seen(part, name)].unsqueeze(0) for name, x in self.full.items()}
        return {**self._operation.queries(part, queries), **keys}


def run_parts(
    operation: Operation, shards: SequenceShards, queries: Tensors, keys: Keys
) -> tuple[Tensor, ...]:
    """The outputs of the local tokens."""
    results = [operation.forward(part, keys.beside(part, queries)) for part in shards.rows()]
    if not results:
        # No device takes a call without queries.
        like = operation.on_meta(ONE_TOKEN, {**queries, **keys.full})
        return tuple(queries["query"].new_empty((0, *x.shape[1:]), dtype=x.dtype) for x in like)
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(pieces) for pieces in zip(*results, strict=True))


def zeros_for(tensors: Tensors) -> dict[str, Tensor]:
    """Sums of gradients: in bfloat16, those of many parts and ranks would lose digits."""
    return {name: x.new_zeros(x.shape, dtype=sum_dtype(x)) for name, x in tensors.items()}


def sum_gradients(
    shards: SequenceShards,
    queries: Tensors,
    keys: Keys,
    wanted: Collection[str],
    gradients: Callable[[Rows, Tensors], Tensors],
) -> dict[str, Tensor]:
    """The gradients of the local queries, and those of all keys that the local queries cause.

    `gradients` returns those of one part, for the arguments that are `wanted` at least.
    """
    given = {name: x for name, x in {**queries, **keys.full}.items() if name in wanted}
    summed = {name: x for name, x in given.items() if name in keys.full or name in SHARED}
    totals = zeros_for(summed)
    pieces = {name: [x[:0]] for name, x in given.items() if name not in totals}
    for part in shards.rows():
        found = gradients(part, keys.beside(part, queries))
        for name, rows in pieces.items():
            rows.append(found[name][0])
        for name, total in totals.items():
            if name in keys.full:
                total[keys.seen(part, name)] += found[name][0]
            elif name in found:
                total.add_(found[name])
    return {**totals, **{name: torch.cat(rows) for name, rows in pieces.items()}}


class RunParts(torch.autograd.Function):
    """`run_parts` with a gradient, from local queries and keys to the outputs of local tokens.

    Saves the local keys and gathers them again in the backward, unless `save_gathered`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        shards: SequenceShards,
        save_gathered: bool,
        ahead: Mapping[str, GatheredKeys],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        queries, local = operation.split(given)
        later = () if save_gathered else operation.for_backward
        read = {name: x for name, x in local.items() if name not in later}
        keys = Keys(operation, shards, read, ahead)
        outputs = run_parts(operation, shards, queries, keys)
        others = (x for i, x in enumerate(outputs) if i != operation.differentiable)
        ctx.mark_non_differentiable(*others)
        save(ctx, operation, shards, {**given, **keys.full} if save_gathered else given, outputs)
        ctx.gathered = save_gathered
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        operation, shards = ctx.operation, ctx.shards
        given, outputs = saved_tensors(ctx)
        queries, local = operation.split(given)
        keys = Keys(operation, shards, local, gathered=ctx.gathered)
        d_out = d_outputs[operation.differentiable]

        def gradients(part: Rows, x: Tensors) -> Tensors:
            own = tuple(y[part.here] for y in outputs)
            return operation.backward(part, x, own, d_out[part.here])

        needed = zip(given, ctx.needs_input_grad[5:], strict=True)
        wanted = [name for name, needs_gradient in needed if needs_gradient]
        with LimitsOfCall(ctx.limits):
            found = sum_gradients(shards, queries, keys, wanted, gradients)
        for name in wanted:
            if name in local:
                found[name] = keys.sources[name].collect(found[name])
        operation.finish_backward(shards, queries)
        return None, None, None, None, None, *in_dtypes(found, given)


def in_dtypes(gradients: Tensors, tensors: Tensors) -> list[Tensor | None]:
    """The gradients in the order and the dtypes of their tensors; None without one."""
    return [
        gradients[name].to(x.dtype) if name in gradients else None for name, x in tensors.items()
    ]


def run(
    operation: Operation,
    shards: SequenceShards,
    save_gathered: bool,
    given: Tensors,
    ahead: Mapping[str, GatheredKeys],
) -> Any:
    """The outputs of the local tokens, differentiable, for the arguments that `guard` returned."""
    with without_autocast(shards):
        return RunParts.apply(operation, shards, save_gathered, ahead, *names_and_tensors(given))


def save(
    ctx: Any,
    operation: Operation,
    shards: SequenceShards,
    tensors: Tensors,
    outputs: tuple[Tensor, ...],
) -> None:
    """Saves a call for `saved_tensors`."""
    ctx.save_for_backward(*tensors.values(), *outputs)
    ctx.operation, ctx.shards, ctx.names = operation, shards, tuple(tensors)
    ctx.limits = limits_in_force()


def saved_tensors(ctx: Any) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """The tensors and outputs of a call. If one rank cannot read them, all raise."""
    saved: tuple[Tensor, ...] = ()
    error: Exception | None = None
    try:
        saved = ctx.saved_tensors
    except Exception as wrong:
        error = wrong
    ctx.shards.agreement.vote(f"ascend::{ctx.operation.name}_grad", {}, error=error)
    return dict(zip(ctx.names, saved, strict=False)), saved[len(ctx.names) :]


def names_and_tensors(tensors: Tensors) -> list[Any]:
    """The names of the tensors that are not omitted, and the tensors.

    A tensor that occurs twice, which torch.compile does not take in a Function, gets a stand-in.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    values = list(given.values())
    stand_ins = [
        x if all(x is not y for y in values[:i]) else x.view_as(x) for i, x in enumerate(values)
    ]
    return [tuple(given), *stand_ins]
