"""Runs an operator part by part: local queries, and the keys of all ranks.

A part is a batch of one in layout BSND: some queries of a sequence, and the keys of that sequence
that they may see, which sparse_mode 3 aligns at the end. Both are views. Packed calls (TND) would
copy the keys once per part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_attn_ops.device_limits import LimitsOfCall, limits_in_force
from ascend_attn_ops.distributed._communication import gather, reduce_scatter, sum_dtype
from ascend_attn_ops.distributed._layout import Layout, Rows, Tensors
from ascend_attn_ops.distributed._ranges import Ranges
from ascend_attn_ops.distributed.shards import SequenceShards

Gradients = tuple["Tensor | None", ...]
# How a kind of keys is spread over the ranks, and which of them a rank gathers.
Source = Layout | Ranges

# Stands for the part of a rank without tokens, where an operator wants queries.
ONE_TOKEN = Rows(number=0, row=0, sequence=0, begin=0, end=1, length=1)


class Operation(ABC):
    """An operator with its options, the fields, and how it runs on one part.

    Queries and keys are batches of one, (1, tokens, ...); outputs have the tokens first.
    """

    name: ClassVar[str]
    # The keys' kinds, by which they are kept for the next operator; empty to keep none.
    kinds: ClassVar[tuple[str, ...]] = ()
    # How many of the last queries have no axis of tokens: all tokens share them.
    shared: ClassVar[int] = 0

    sparse_mode: int

    def last_key(self, part: Rows) -> int:
        """How many keys of the sequence to pass."""
        # Mode 3 aligns the last query with the last key; other modes see the whole sequence.
        return part.end if self.sparse_mode == 3 else part.length

    def never_cast(self) -> tuple[str, ...]:
        """Names of further arguments that autocast leaves alone."""
        return ()

    def sources(self, shards: SequenceShards, keys: Tensors) -> list[Source]:
        """How each of the keys is gathered: all of it, by default."""
        return [shards] * len(keys)

    def ranges(self, part: Rows, keys: Tensors) -> list[tuple[int, int]]:
        """The first of each of the keys of the sequence to pass, and one past the last."""
        return [(0, self.last_key(part))] * len(keys)

    def seen(self, part: Rows, sources: Sequence[Source], keys: Tensors) -> list[slice]:
        """The same among the keys that were gathered."""
        ranges = self.ranges(part, keys)
        return [
            source.seen(part, begin, end)
            for source, (begin, end) in zip(sources, ranges, strict=True)
        ]

    @abstractmethod
    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The outputs of one part."""

    def queries(self, part: Rows, queries: Tensors) -> list[Any]:
        """Returns the tensors of one part."""
        count = len(queries) - self.shared
        return [*part.queries(queries[:count]), *queries[count:]]

    def keys(self, part: Rows, sources: Sequence[Source], full: Tensors) -> list[Any]:
        """Returns the keys of one part."""
        seen = self.seen(part, sources, full)
        return [x if x is None else x[y].unsqueeze(0) for x, y in zip(full, seen, strict=True)]

    def on_part(
        self, part: Rows, sources: Sequence[Source], queries: Tensors, full: Tensors
    ) -> tuple[Tensor, ...]:
        """The outputs of one part of the local tokens, with the keys that were gathered."""
        return self.forward(part, self.queries(part, queries), self.keys(part, sources, full))

    def on_meta(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The same without data."""
        count = len(queries) - self.shared
        shared = [x if x is None else x.to("meta") for x in queries[count:]]
        with torch.no_grad():
            own = [*_meta(queries[:count], [part.count] * count), *shared]
            counts = [end - begin for begin, end in self.ranges(part, keys)]
            return self.dry_run(part, own, _meta(keys, counts))

    def dry_run(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The forward without data; raises what the backward would raise for the same tensors."""
        return self.forward(part, queries, keys)

    def check_values(  # noqa: B027, an operation may read no values
        self, parts: Sequence[Rows], queries: Tensors
    ) -> None:
        """Raise what the operator would raise for values of the local queries."""


class DifferentiableOperation(Operation):
    # Position of the output that is differentiable.
    differentiable: ClassVar[int]
    # How many of the last keys the backward alone reads.
    for_backward: ClassVar[int] = 0

    @abstractmethod
    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        """The gradients of queries and keys; d and outputs are rows of the part, tokens first."""

    def finish_backward(self, shards: SequenceShards, queries: Tensors) -> None:
        """Called on all ranks after the gradients of all parts."""


def _meta(tensors: Tensors, tokens: Sequence[int]) -> list[Any]:
    return [
        x if x is None else x.new_empty((1, count, *x.shape[1:]), device="meta")
        for x, count in zip(tensors, tokens, strict=True)
    ]


def gather_keys(
    shards: SequenceShards, sources: Sequence[Source], kinds: tuple[str, ...], keys: Tensors
) -> list[Tensor | None]:
    """The keys that a rank needs, and with `kinds` kept for the next operator."""

    def gathered(source: Source, kind: str, x: Tensor) -> Tensor:
        if isinstance(source, Ranges):
            return source.gather(x)
        return shards._gathered.take(source, kind, x) if kind else gather(source, x)

    return [
        None if x is None else gathered(source, kind, x)
        for source, kind, x in zip(sources, kinds or [""] * len(keys), keys, strict=True)
    ]


def return_gradient(source: Source, d: Tensor) -> Tensor:
    """The gradient of local keys, from those that all ranks have of the keys they gathered."""
    return source.collect(d) if isinstance(source, Ranges) else reduce_scatter(source, d)


def run_parts(
    operation: Operation,
    shards: SequenceShards,
    sources: Sequence[Source],
    queries: Tensors,
    full: Tensors,
) -> tuple[Tensor, ...]:
    """The outputs of the local tokens."""
    results = [operation.on_part(part, sources, queries, full) for part in shards.rows()]
    if not results:
        # No device takes a call without queries.
        like = operation.on_meta(ONE_TOKEN, queries, full)
        return tuple(queries[0].new_empty((0, *x.shape[1:]), dtype=x.dtype) for x in like)
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(pieces) for pieces in zip(*results, strict=True))


def sum_gradients(
    shards: SequenceShards,
    queries: Tensors,
    full: Tensors,
    seen: Callable[[Rows], Sequence[slice]],
    gradients: Callable[[Rows], tuple[Gradients, Gradients]],
    shared: int = 0,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the local queries, and those of all keys that the local queries cause.

    Args:
        shards: which tokens are local.
        queries, full: the tensors to differentiate; tensors of integers have no gradient.
        seen: the keys that a part sees.
        gradients: those of one part, batches of one.
        shared: how many of the last queries all tokens share. Their gradients are summed.
    """
    # Every part adds to the keys, and every rank: summed in bfloat16, they would lose digits.
    d_full = [None if x is None else x.new_zeros(x.shape, dtype=sum_dtype(x)) for x in full]
    pieces: list[Gradients] = []
    for part in shards.rows():
        d_queries, d_keys = gradients(part)
        pieces.append(d_queries)
        for total, d, rows in zip(d_full, d_keys, seen(part), strict=True):
            if total is not None and d is not None:
                total[rows] += d[0]
    d_rows = [
        torch.cat([x[:0], *(d[i][0] for d in pieces)])  # type: ignore[index]
        if x is not None and x.is_floating_point() and (not pieces or pieces[0][i] is not None)
        else None
        for i, x in enumerate(queries[: len(queries) - shared])
    ]
    for i in range(len(queries) - shared, len(queries)):
        x = queries[i]
        d_rows.append(None if x is None else sum_of(x, [d[i] for d in pieces]))
    return d_rows, d_full


def sum_of(x: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:
    """The gradient of a tensor that several parts share."""
    total = x.new_zeros(x.shape, dtype=sum_dtype(x))
    for d in gradients:
        if d is not None:
            total += d
    return total.to(x.dtype)


class RunParts(torch.autograd.Function):
    """`run_parts` with a gradient, from local queries and keys to the outputs of local tokens.

    Saves the local keys and gathers them again in the backward, unless `save_gathered`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operation: DifferentiableOperation,
        shards: SequenceShards,
        save_gathered: bool,
        query_count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        queries, keys = tensors[:query_count], tensors[query_count:]
        sources = operation.sources(shards, keys)
        read = list(keys)
        if operation.for_backward and not save_gathered:
            read[-operation.for_backward :] = [None] * operation.for_backward
        full = gather_keys(shards, sources, operation.kinds, read)
        outputs = run_parts(operation, shards, sources, queries, full)
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(outputs) if i != operation.differentiable)
        )
        ctx.save_for_backward(*queries, *(full if save_gathered else keys), *outputs)
        ctx.operation, ctx.shards, ctx.save_gathered = operation, shards, save_gathered
        ctx.counts = (query_count, len(tensors))
        ctx.limits = limits_in_force()
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        operation, shards = ctx.operation, ctx.shards
        query_count, count = ctx.counts
        saved = saved_tensors(ctx)
        queries, keys, outputs = saved[:query_count], saved[query_count:count], saved[count:]
        d_out = d_outputs[operation.differentiable]
        sources = operation.sources(shards, keys)
        full = keys if ctx.save_gathered else gather_keys(shards, sources, (), keys)

        def seen(part: Rows) -> list[slice]:
            return operation.seen(part, sources, full)

        def gradients(part: Rows) -> tuple[Gradients, Gradients]:
            own = [x[part.here] for x in outputs]
            rows, passed = operation.queries(part, queries), operation.keys(part, sources, full)
            return operation.backward(part, rows, passed, own, d_out[part.here])

        with LimitsOfCall(ctx.limits):
            d_queries, d_full = sum_gradients(
                shards, queries, full, seen, gradients, operation.shared
            )
        wanted = ctx.needs_input_grad[4 + query_count :]
        d_keys = [
            None if x is None or d is None or not want else return_gradient(source, d).to(x.dtype)
            for source, x, d, want in zip(sources, keys, d_full, wanted, strict=True)
        ]
        operation.finish_backward(shards, queries)
        return None, None, None, None, *d_queries, *d_keys


def run(
    operation: DifferentiableOperation,
    shards: SequenceShards,
    save_gathered: bool,
    queries: Tensors,
    keys: Tensors,
) -> Any:
    """The outputs of the local tokens, differentiable."""
    return RunParts.apply(
        operation, shards, save_gathered, len(queries), *distinct([*queries, *keys])
    )


def saved_tensors(ctx: Any) -> Tensors:
    """The tensors that the forward saved. If one rank cannot read them, all raise."""
    saved: Tensors = ()
    error: Exception | None = None
    try:
        saved = ctx.saved_tensors
    except Exception as wrong:
        error = wrong
    ctx.shards.agreement.vote(f"ascend::{ctx.operation.name}_grad", {}, error=error)
    return saved


def distinct(tensors: Tensors) -> list[Any]:
    """Stand-ins for tensors that occur twice, which torch.compile does not take in a Function."""
    return [
        x if x is None or all(x is not y for y in tensors[:i]) else x.view_as(x)
        for i, x in enumerate(tensors)
    ]
