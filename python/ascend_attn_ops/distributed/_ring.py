"""Ring attention: keys and values go from rank to rank, and every rank merges what it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_attn_ops._statistics import merge as merge_statistics
from ascend_attn_ops.device_limits import LimitsOfCall
from ascend_attn_ops.distributed._layout import Layout, Rows, sum_dtype
from ascend_attn_ops.distributed._operations import SHARED, DenseAttention, Tensors
from ascend_attn_ops.distributed._parts import (
    Keys,
    in_dtypes,
    run_parts,
    save,
    saved_tensors,
    zeros_for,
)
from ascend_attn_ops.distributed.shards import SequenceShards

# out, softmax_max and softmax_sum of some queries, tokens first.
Result = tuple[Tensor, Tensor, Tensor]


def merge(x: Result, y: Result) -> Result:
    """Attention over disjoint sets of keys -> over both."""
    maximum, total, (share_x, share_y) = merge_statistics(x[1:], y[1:])
    return x[0] * share_x[..., :1] + y[0] * share_y[..., :1], maximum, total


class _Exchange:
    """Tensors on their way to the next rank, and others from the one before."""

    def __init__(self, shards: Layout, tensors: Tensors) -> None:
        rank, size, group = shards.rank, shards.world_size, shards.group
        self.sent = tensors  # not to be freed before they have arrived
        self.received = {name: torch.empty_like(x) for name, x in tensors.items()}
        self.works = dist.batch_isend_irecv([
            *(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size)
              for x in tensors.values()),
            *(dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % size)
              for x in self.received.values()),
        ])  # fmt: skip

    def wait(self) -> dict[str, Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _rounds(shards: Layout, keys: Tensors) -> Iterator[tuple[int, Tensors]]:
    """The keys of every rank, this one's first, and whose they are; the next travel meanwhile."""
    for step in range(shards.world_size):
        last = step + 1 == shards.world_size
        exchange = None if last else _Exchange(shards, keys)
        yield (shards.rank - step) % shards.world_size, keys
        if exchange is not None:
            keys = exchange.wait()


def _blocks(
    operation: DenseAttention, shards: Layout, source: int
) -> Iterator[tuple[DenseAttention, Rows, slice]]:
    """The work of this rank for the keys of `source`: operation, part, and rows of its keys."""
    causal = operation.causal
    of_all_keys = replace(operation, options={**operation.options, "sparse_mode": 0})
    for part in shards.rows():
        for theirs in shards.rows(source):
            if theirs.sequence != part.sequence or (causal and theirs.begin > part.begin):
                continue
            # Parts are disjoint or one: only a part's own keys are cut by the diagonal.
            diagonal = causal and theirs.begin == part.begin
            yield operation if diagonal else of_all_keys, part, theirs.here


def _tensors(
    block: DenseAttention, part: Rows, queries: Tensors, keys: Tensors, rows: slice, seen: Iterable
) -> Tensors:
    """The tensors of a block, with the sink in the first block of each part alone."""
    own = block.queries(part, queries)
    if part.number in seen:
        own.pop("sink", None)
    return {**own, **{name: x[rows].unsqueeze(0) for name, x in keys.items()}}


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: DenseAttention,
        shards: SequenceShards,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        queries, keys = operation.split(given)
        # Every part meets its own keys first, part after part.
        results: dict[int, Result] = {}
        for source, theirs in _rounds(shards, {name: shards.pad(x) for name, x in keys.items()}):
            for block, part, rows in _blocks(operation, shards, source):
                x = _tensors(block, part, queries, theirs, rows, results)
                out, softmax_max, softmax_sum = block.forward(part, x)
                result = (out.to(sum_dtype(out)), softmax_max, softmax_sum)
                before = results.get(part.number)
                results[part.number] = result if before is None else merge(before, result)
        if results:
            outputs = tuple(map(torch.cat, zip(*results.values(), strict=True)))
        else:
            local = Keys(operation, shards, keys, gathered=True)
            outputs = run_parts(operation, shards, queries, local)
        outputs = (outputs[0].to(queries["query"].dtype), *outputs[1:])
        ctx.mark_non_differentiable(*outputs[1:])
        save(ctx, operation, shards, given, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        operation, shards = ctx.operation, ctx.shards
        given, outputs = saved_tensors(ctx)
        queries, keys = operation.split(given)
        padded = {name: shards.pad(x) for name, x in keys.items()}
        d_queries, d_keys = zeros_for(queries), zeros_for(padded)
        # The gradient of the sink needs no keys: any block of a part has all of it.
        seen: set[int] = set()
        for source, theirs in _rounds(shards, padded):
            with LimitsOfCall(ctx.limits):
                for block, part, rows in _blocks(operation, shards, source):
                    x = _tensors(block, part, queries, theirs, rows, seen)
                    seen.add(part.number)
                    own = tuple(y[part.here] for y in outputs)
                    found = block.backward(part, x, own, d_out[part.here])
                    for name, total in d_queries.items():
                        if name not in SHARED:
                            total[part.here] += found[name][0]
                        elif name in x:
                            total.add_(found[name])
                    for name, total in d_keys.items():
                        total[rows] += found[name][0]
            # They travel with their keys, and are home after as many steps as there are ranks.
            d_keys = _Exchange(shards, d_keys).wait()
        d_local = {name: d[: shards.local_tokens] for name, d in d_keys.items()}
        return None, None, None, *in_dtypes({**d_queries, **d_local}, given)
