"""Runs an operator part by part: local queries, and the keys of all ranks.

A part is a batch of one in layout BSND: some queries of a sequence, and the keys of that sequence
that they may see, which sparse_mode 3 aligns at the end. Both are views. Packed calls (TND) would
copy the keys once per part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import shown
from ascend_attn_ops.device_limits import LimitsOfCall
from ascend_attn_ops.distributed._agreement import agree
from ascend_attn_ops.distributed._collectives import gather, reduce_scatter, sum_dtype

if TYPE_CHECKING:
    from ascend_attn_ops.distributed.shards import SequenceShards

# None for optional ones that are missing. The operators check that no other is.
Tensors = Sequence[Any]
Gradients = tuple["Tensor | None", ...]


@dataclass(frozen=True)
class Rows:
    """A part, as the operators see it: queries `begin` to `end` of a sequence of `length` tokens.

    Attributes:
        row: the first of the queries among the local tokens.
        start: the first token of the sequence among those of the batch.
    """

    row: int
    start: int
    begin: int
    end: int
    length: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def queries(self, x: Tensor) -> Tensor:
        """Their rows of local tokens, as a batch of one."""
        return x[self.row : self.row + self.count].unsqueeze(0)

    def keys(self, x: Tensor, last: int) -> Tensor:
        """The first `last` tokens of their sequence, as a batch of one."""
        return x[self.start : self.start + last].unsqueeze(0)


def local_rows(shards: SequenceShards) -> list[Rows]:
    """The parts of this rank."""
    result, row = [], 0
    for sequence, begin, end in shards.parts():
        result.append(Rows(row, shards._starts[sequence], begin, end, shards.lengths[sequence]))
        row += end - begin
    return result


class Operation(ABC):
    """An operator with its options, and how it runs on one part.

    Queries and keys are batches of one, (1, tokens, ...); outputs have the tokens first.
    """

    name: ClassVar[str]
    # The keys' kinds, by which they are kept for the next operator; empty to keep none.
    kinds: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def last_key(self, part: Rows) -> int:
        """How many keys of the sequence to pass."""

    @abstractmethod
    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The outputs of one part."""


class DifferentiableOperation(Operation):
    # Position of the output that is differentiable.
    differentiable: ClassVar[int]

    @abstractmethod
    def empty(self, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The outputs of a rank without tokens; queries are (0, ...), keys those of all ranks."""

    @abstractmethod
    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        """The gradients of queries and keys; d and outputs are rows of the part, tokens first."""


def gather_keys(
    shards: SequenceShards, kinds: tuple[str, ...], keys: Tensors
) -> list[Tensor | None]:
    """The keys of all ranks, and with `kinds` kept for the next operator."""
    if not kinds:
        return [None if x is None else gather(shards, x) for x in keys]
    return [
        None if x is None else shards._gathered.take(shards, kind, x)
        for kind, x in zip(kinds, keys, strict=True)
    ]


def run_parts(
    operation: DifferentiableOperation, shards: SequenceShards, queries: Tensors, full: Tensors
) -> tuple[Tensor, ...]:
    """The outputs of the local tokens."""
    results = [
        operation.forward(part, queries_of(part, queries), keys_of(operation, part, full))
        for part in local_rows(shards)
    ]
    if not results:
        return operation.empty(queries, full)
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(pieces) for pieces in zip(*results, strict=True))


def queries_of(part: Rows, tensors: Tensors) -> list[Tensor | None]:
    return [None if x is None else part.queries(x) for x in tensors]


def keys_of(operation: Operation, part: Rows, tensors: Tensors) -> list[Tensor | None]:
    last = operation.last_key(part)
    return [None if x is None else part.keys(x, last) for x in tensors]


class RunParts(torch.autograd.Function):
    """`run_parts`, and its gradient: local queries and keys in, outputs of the local tokens out.

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
        full = gather_keys(shards, operation.kinds, keys)
        outputs = run_parts(operation, shards, queries, full)
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
        saved = ctx.saved_tensors
        queries, keys, outputs = (
            saved[:query_count],
            saved[query_count:count],
            saved[count:],
        )
        d_out = d_outputs[operation.differentiable]
        full = keys if ctx.save_gathered else gather_keys(shards, (), keys)
        with LimitsOfCall(ctx.limits):
            d_queries, d_full = _run_parts_backward(
                operation, shards, queries, full, outputs, d_out
            )
        wanted = ctx.needs_input_grad[4 + query_count :]
        d_keys = [
            None if x is None or d is None or not want else reduce_scatter(shards, d).to(x.dtype)
            for x, d, want in zip(keys, d_full, wanted, strict=True)
        ]
        return None, None, None, None, *d_queries, *d_keys


def _run_parts_backward(
    operation: DifferentiableOperation,
    shards: SequenceShards,
    queries: Tensors,
    full: Tensors,
    outputs: Tensors,
    d_out: Tensor,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the local queries, and those of all keys that the local queries cause."""
    # Every part adds to the keys, and every rank: summed in bfloat16, they would lose digits.
    d_full = [None if x is None else x.new_zeros(x.shape, dtype=sum_dtype(x)) for x in full]
    pieces: list[Gradients] = []
    for part in local_rows(shards):
        rows = slice(part.row, part.row + part.count)
        d_queries, d_keys = operation.backward(
            part,
            queries_of(part, queries),
            keys_of(operation, part, full),
            [None if x is None else x[rows] for x in outputs],
            d_out[rows],
        )
        pieces.append(d_queries)
        for total, d in zip(d_full, d_keys, strict=True):
            if total is not None and d is not None:
                total[part.start : part.start + d.shape[1]] += d[0]
    if not pieces:
        floating = [x is not None and x.is_floating_point() for x in queries]
        return [
            torch.zeros_like(x) if x is not None and real else None
            for x, real in zip(queries, floating, strict=True)
        ], d_full
    d_rows = [
        None if parts[0] is None else torch.cat([d[0] for d in parts if d is not None])
        for parts in zip(*pieces, strict=True)
    ]
    return d_rows, d_full


def distinct(tensors: Tensors) -> list[Any]:
    """Stand-ins for tensors that occur twice, which torch.compile does not take in a Function."""
    return [
        x if x is None or all(x is not y for y in tensors[:i]) else x.view_as(x)
        for i, x in enumerate(tensors)
    ]


def limits_in_force() -> int | None:
    # Compiled code checks limits when it is traced.
    return None if is_compiling() else _C.limits_override()


def tokens_first(x: Tensor, layout: str) -> Tensor:
    return x.squeeze(0) if layout == "BSND" else x


def batch_first(x: Tensor, layout: str) -> Tensor:
    return x.unsqueeze(0) if layout == "BSND" else x


def as_tokens(
    name: str,
    shards: SequenceShards,
    layout: str,
    tensors: Mapping[str, Tensor | None],
    statistics: Sequence[str] = (),
) -> tuple[dict[str, Tensor | None], Exception | None]:
    """The tensors with the local tokens first, or what is wrong with them.

    Args:
        name: of the function.
        shards: which tokens are local.
        layout: of the tensors.
        tensors: by name.
        statistics: names of tensors that have the tokens second to last, (1, T, N) in TND.
    """
    where = f"ascend::{name}"
    if layout not in ("TND", "BSND"):
        return {}, ValueError(f"{where}: layout: expected 'TND' or 'BSND', got {shown(layout)}")
    result: dict[str, Tensor | None] = {}
    device = None
    for argument, x in tensors.items():
        if x is None:
            result[argument] = None
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            return {}, TypeError(
                f"{where}: {argument}: expected a tensor of this rank's tokens, "
                f"got {type(x).__name__}"
            )
        device = device or x.device
        if x.device.type not in shards._device_types or x.device != device:
            return {}, ValueError(
                f"{where}: {argument}: expected device {_devices(shards, device)}, got {x.device}"
            )
        leading = (1,) * ((argument in statistics) + (layout == "BSND"))
        shape = (*leading, shards.local_tokens)
        if tuple(x.shape[: len(shape)]) != shape:
            return {}, ValueError(
                f"{where}: {argument}: expected the {shards.local_tokens} local tokens of shards, "
                f"shape ({', '.join(map(str, shape))}, ...), got {tuple(x.shape)}"
            )
        for _ in leading:
            x = x.squeeze(0)
        result[argument] = x
    return result, None


def _devices(shards: SequenceShards, device: torch.device) -> str:
    if device.type in shards._device_types:
        return f"{device} (the first tensor's)"
    return f"{' or '.join(sorted(shards._device_types))} (the group's)"


def check(
    operation: Operation,
    shards: SequenceShards,
    error: Exception | None,
    *,
    queries: Mapping[str, Tensor | None],
    keys: Mapping[str, Tensor | None],
    others: Mapping[str, Tensor | None] | None = None,
    kinds: Mapping[str, Tensor | None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[bool]:
    """Raise on all ranks if the call is wrong on any, before anything travels.

    Args:
        operation: with options that must be equal on all ranks.
        shards: which tokens are local.
        error: what was found so far.
        queries, keys: arguments of the operation by name, local tokens first.
        others: further tensors that travel.
        kinds: keys that may have been gathered before, by kind.
        options: further options.

    Returns:
        For each of `kinds`, whether a rank does not have it.
    """
    tensors = {**queries, **keys, **(others or {})}
    missing = [
        x is not None and not is_compiling() and not shards._gathered.has(kind, x)
        for kind, x in (kinds or {}).items()
    ]
    facts: dict[str, Any] = {}
    if error is None and not is_compiling():
        facts = {**vars(operation), **(options or {})}
        for argument, x in tensors.items():
            facts[argument] = x if x is None else (*x.shape[1:], str(x.dtype))
        facts["gradient"] = [
            argument
            for argument, x in tensors.items()
            if x is not None and x.requires_grad and torch.is_grad_enabled()
        ]
        call = (operation.name, repr(facts), _C.limits_override())
        try:
            if call not in shards._checked:
                _run_on_meta(operation, shards, queries, keys)
                shards._checked.add(call)
        except (TypeError, ValueError, NotImplementedError) as wrong:
            error = wrong
    return agree(shards, f"ascend::{operation.name}", error, facts, missing)


def forget_unless_all_have(
    shards: SequenceShards, kinds: Mapping[str, Tensor | None], missing: Sequence[bool]
) -> None:
    """Either all ranks gather a kind of keys, or none."""
    for kind, some_rank_lacks_it in zip(kinds, missing, strict=True):
        if some_rank_lacks_it:
            shards._gathered.drop(shards, kind)


def _run_on_meta(
    operation: Operation,
    shards: SequenceShards,
    queries: Mapping[str, Tensor | None],
    keys: Mapping[str, Tensor | None],
) -> None:
    """Let the operator check the call, without data: all rules are its own.

    Of the parts, those with the most queries and with the most keys can break a limit.
    """
    parts = local_rows(shards)
    if not parts:
        return
    worst = {max(parts, key=lambda x: x.count), max(parts, key=lambda x: x.end)}
    with torch.no_grad():
        for part in worst:
            last = operation.last_key(part)
            operation.forward(
                part,
                [_meta(x, part.count) for x in queries.values()],
                [_meta(x, last) for x in keys.values()],
            )


def _meta(x: Tensor | None, tokens: int) -> Tensor | None:
    if x is None:
        return None
    return torch.empty((1, tokens, *x.shape[1:]), dtype=x.dtype, device="meta")
