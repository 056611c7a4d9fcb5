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
from ascend_attn_ops.device_limits import LimitsOfCall
from ascend_attn_ops.distributed._communication import sum_dtype
from ascend_attn_ops.distributed._layout import Layout, Rows
from ascend_attn_ops.distributed._operations import DenseAttention
from ascend_attn_ops.distributed._parts import limits_in_force, run_parts, saved_tensors, sum_of
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

    def __init__(self, shards: Layout, tensors: list[Tensor]) -> None:
        rank, size, group = shards.rank, shards.world_size, shards.group
        self.sent = tensors  # not to be freed before they have arrived
        self.received = [torch.empty_like(x) for x in tensors]
        self.works = dist.batch_isend_irecv([
            *(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size)
              for x in tensors),
            *(dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % size)
              for x in self.received),
        ])  # fmt: skip

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _rounds(shards: Layout, keys: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
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
            if theirs.start != part.start or (causal and theirs.begin > part.begin):
                continue
            # Parts are disjoint or one: only a part's own keys are cut by the diagonal.
            diagonal = causal and theirs.begin == part.begin
            yield operation if diagonal else of_all_keys, number, part, theirs.here


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: DenseAttention,
        shards: SequenceShards,
        query: Tensor,
        sink: Tensor | None,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, ...]:
        results: list[Result | None] = [None] * len(shards.rows())
        for source, keys in _rounds(shards, [shards.pad(key), shards.pad(value)]):
            for block, number, part, rows in _blocks(operation, shards, source):
                before = results[number]
                # One block of each row includes the sink.
                queries = block.queries(part, [query, sink if before is None else None])
                out, softmax_max, softmax_sum = block.forward(
                    part, queries, [x[rows].unsqueeze(0) for x in keys]
                )
                result = (out.to(sum_dtype(out)), softmax_max, softmax_sum)
                results[number] = result if before is None else merge(before, result)
        found = [result for result in results if result is not None]
        if found:
            out, softmax_max, softmax_sum = (torch.cat(x) for x in zip(*found, strict=True))
        else:
            out, softmax_max, softmax_sum = run_parts(
                operation, shards, [query, sink], [key, value]
            )
        out = out.to(query.dtype)
        ctx.mark_non_differentiable(softmax_max, softmax_sum)
        ctx.save_for_backward(query, sink, key, value, out, softmax_max, softmax_sum)
        ctx.operation, ctx.shards, ctx.limits = operation, shards, limits_in_force()
        return out, softmax_max, softmax_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        operation, shards = ctx.operation, ctx.shards
        query, sink, key, value, *outputs = saved_tensors(ctx)
        d_query = query.new_zeros(query.shape, dtype=sum_dtype(query))
        keys = [shards.pad(key), shards.pad(value)]
        # They travel with their keys, and are home after as many steps as there are ranks.
        d_keys = [x.new_zeros(x.shape, dtype=sum_dtype(x)) for x in keys]
        d_sinks: dict[int, Tensor | None] = {}
        for source, theirs in _rounds(shards, keys):
            with LimitsOfCall(ctx.limits):
                for block, number, part, rows in _blocks(operation, shards, source):
                    # The gradient of the sink needs no keys: any block of a row has all of it.
                    own = None if number in d_sinks else sink
                    (d, d_sink), d_block = block.backward(
                        part, block.queries(part, [query, own]),
                        [x[rows].unsqueeze(0) for x in theirs],
                        [x[part.here] for x in outputs], d_out[part.here],
                    )  # fmt: skip
                    assert d is not None
                    d_query[part.here] += d[0]
                    d_sinks.setdefault(number, d_sink)
                    for total, d_key in zip(d_keys, d_block, strict=True):
                        assert d_key is not None
                        total[rows] += d_key[0]
            if shards.world_size > 1:
                d_keys = _Exchange(shards, d_keys).wait()
        d_key, d_value = (d[: shards.local_tokens].to(key.dtype) for d in d_keys)
        d_shared = None if sink is None else sum_of(sink, list(d_sinks.values()))
        return None, None, d_query.to(query.dtype), d_shared, d_key, d_value
