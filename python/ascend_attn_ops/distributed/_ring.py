"""Ring attention: keys and values go from rank to rank, and every rank merges what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_attn_ops._statistics import merge as merge_statistics
from ascend_attn_ops.device_limits import LimitsOfCall, limits_in_force
from ascend_attn_ops.distributed._communication import sum_dtype
from ascend_attn_ops.distributed._layout import Layout, Rows, Tensors
from ascend_attn_ops.distributed._operations import DenseAttention
from ascend_attn_ops.distributed._parts import run_parts, saved_tensors, sum_of
from ascend_attn_ops.distributed.shards import SequenceShards

# out, softmax_max and softmax_sum of some queries, tokens first.
Result = tuple[Tensor, Tensor, Tensor]


def merge(x: Result, y: Result) -> Result:
    """Attention over disjoint sets of keys -> over both."""
    (out_x, max_x, sum_x), (out_y, max_y, sum_y) = x, y
    maximum, total, (share_x, share_y) = merge_statistics((max_x, sum_x), (max_y, sum_y))
    return out_x * share_x[..., :1] + out_y * share_y[..., :1], maximum, total


class _Exchange:
    """Tensors on their way to the next rank, and others from the one before."""

    def __init__(self, shards: Layout, tensors: Tensors) -> None:
        rank, size, group = shards.rank, shards.world_size, shards.group
        self.sent = tensors  # not to be freed before they have arrived
        self.received = [x if x is None else torch.empty_like(x) for x in tensors]
        self.works = dist.batch_isend_irecv([
            *(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size)
              for x in tensors if x is not None),
            *(dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % size)
              for x in self.received if x is not None),
        ])  # fmt: skip

    def wait(self) -> Tensors:
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
) -> Iterator[tuple[DenseAttention, int, Rows, slice]]:
    """Finds the work of this rank for the keys of `source`.

    Yields the operation, the number of the local part, the part, and its keys' rows at the source.
    """
    causal = operation.sparse_mode == 3
    of_all_keys = replace(operation, sparse_mode=0)
    for number, part in enumerate(shards.rows()):
        for theirs in shards.rows(source):
            if theirs.sequence != part.sequence or (causal and theirs.begin > part.begin):
                continue
            # Parts are disjoint or one: only a part's own keys are cut by the diagonal.
            diagonal = causal and theirs.begin == part.begin
            yield operation if diagonal else of_all_keys, number, part, theirs.here


def _padded(shards: Layout, keys: Tensors) -> Tensors:
    return [x if x is None else shards.pad(x) for x in keys]


def _batches(tensors: Tensors, rows: slice) -> Tensors:
    """Some rows as batches of one."""
    return [x if x is None else x[rows].unsqueeze(0) for x in tensors]


def _zeros(tensors: Tensors) -> Tensors:
    """Sums of gradients."""
    return [x if x is None else x.new_zeros(x.shape, dtype=sum_dtype(x)) for x in tensors]


def _add(totals: Tensors, rows: slice, gradients: Tensors) -> None:
    """Adds gradients of `_batches` to the rows."""
    for total, d in zip(totals, gradients, strict=True):
        if total is not None:
            total[rows] += d[0]


def _cast(gradients: Tensors, tensors: Tensors) -> Tensors:
    """The gradients in the dtypes of their tensors."""
    return [d if x is None else d.to(x.dtype) for x, d in zip(tensors, gradients, strict=True)]


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: DenseAttention,
        shards: SequenceShards,
        query: Tensor,
        query_rope: Tensor | None,
        sink: Tensor | None,
        *keys: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results: list[Result | None] = [None] * len(shards.rows())
        for source, theirs in _rounds(shards, _padded(shards, keys)):
            for block, number, part, rows in _blocks(operation, shards, source):
                before = results[number]
                # One block of each row includes the sink.
                own = sink if before is None else None
                queries = block.queries(part, [query, query_rope, own])
                out, softmax_max, softmax_sum = block.forward(part, queries, _batches(theirs, rows))
                result = (out.to(sum_dtype(out)), softmax_max, softmax_sum)
                results[number] = result if before is None else merge(before, result)
        found = [result for result in results if result is not None]
        if found:
            out, softmax_max, softmax_sum = (torch.cat(x) for x in zip(*found, strict=True))
        else:
            out, softmax_max, softmax_sum = run_parts(
                operation, shards, operation.sources(shards, keys), [query, query_rope, sink], keys
            )
        out = out.to(query.dtype)
        ctx.mark_non_differentiable(softmax_max, softmax_sum)
        ctx.save_for_backward(query, query_rope, sink, *keys, out, softmax_max, softmax_sum)
        ctx.operation, ctx.shards, ctx.limits = operation, shards, limits_in_force()
        return out, softmax_max, softmax_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        operation, shards = ctx.operation, ctx.shards
        saved = saved_tensors(ctx)
        (query, query_rope, sink), keys, outputs = saved[:3], saved[3:6], saved[6:]
        queries = [query, query_rope]
        d_queries = _zeros(queries)
        padded = _padded(shards, keys)
        # They travel with their keys, and are home after as many steps as there are ranks.
        d_keys = _zeros(padded)
        d_sinks: dict[int, Tensor | None] = {}
        for source, theirs in _rounds(shards, padded):
            with LimitsOfCall(ctx.limits):
                for block, number, part, rows in _blocks(operation, shards, source):
                    # The gradient of the sink needs no keys: any block of a row has all of it.
                    own = None if number in d_sinks else sink
                    (*d_rows, d_sink), d_block = block.backward(
                        part, block.queries(part, [*queries, own]), _batches(theirs, rows),
                        [x[part.here] for x in outputs], d_out[part.here],
                    )  # fmt: skip
                    d_sinks.setdefault(number, d_sink)
                    _add(d_queries, part.here, d_rows)
                    _add(d_keys, rows, d_block)
            if shards.world_size > 1:
                d_keys = _Exchange(shards, d_keys).wait()
        d_own = [x if x is None else x[: shards.local_tokens] for x in d_keys]
        d_shared = None if sink is None else sum_of(sink, list(d_sinks.values()))
        return None, None, *_cast(d_queries, queries), d_shared, *_cast(d_own, keys)
