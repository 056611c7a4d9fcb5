"""Tokens between ranks: functional collectives, which torch.compile traces as they are."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from ascend_attn_ops.distributed._layout import Layout


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the ranks' gradients of x are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def start_gather(layout: Layout, x: Tensor) -> Tensor:
    """Start to send the local tokens (local_tokens, ...) to all ranks; returns padded rows."""
    padded = layout.pad(x)
    if layout.alone:
        return padded
    where = (layout.world_size, layout.group_name)
    functional = torch.ops._c10d_functional
    # Two all-gathers under way at once corrupt gloo's memory (seen with torch 2.13 and 2.14) where
    # they allocate their output. So they do not allocate it, or, in a graph, wait for each other.
    if is_compiling():
        rows = functional.all_gather_into_tensor(padded, *where)
        return functional.wait_tensor(rows) if x.device.type == "cpu" else rows
    rows = padded.new_empty(layout.world_size * len(padded), *padded.shape[1:])
    return functional.all_gather_into_tensor_out(padded, *where, out=rows)


def finish_gather(layout: Layout, rows: Tensor) -> Tensor:
    """Wait for the tokens of all ranks, and put them into the order of the batch: (tokens, ...)."""
    if layout.alone:
        return rows
    rows = torch.ops._c10d_functional.wait_tensor(rows)
    return rows.index_select(0, layout.index("from_padded", rows.device))


def gather(layout: Layout, x: Tensor) -> Tensor:
    return finish_gather(layout, start_gather(layout, x))


def reduce_scatter(layout: Layout, x: Tensor) -> Tensor:
    """Sum (tokens, ...) over the ranks, and keep the local tokens."""
    if layout.alone:
        return x
    # Rows of padding carry token 0, and are cut off at the end.
    rows = x.index_select(0, layout.index("to_padded", x.device))
    mine = torch.ops._c10d_functional.reduce_scatter_tensor(
        rows, "sum", layout.world_size, layout.group_name
    )
    return torch.ops._c10d_functional.wait_tensor(mine)[: layout.local_tokens]


def all_reduce(layout: Layout, x: Tensor) -> Tensor:
    """Sum over the ranks."""
    if layout.world_size == 1:
        return x
    total = torch.ops._c10d_functional.all_reduce(x, "sum", layout.group_name)
    return torch.ops._c10d_functional.wait_tensor(total)


def tokens_to_heads(layout: Layout, x: Tensor) -> Tensor:
    """(local_tokens, N, D) of all heads -> (tokens, N / P, D) of this rank's heads."""
    size = layout.world_size
    if layout.alone:
        return x[:, : x.shape[1] // size]
    by_rank = layout.pad(x).unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    rows = _exchange(layout, by_rank).flatten(0, 1)
    return rows.index_select(0, layout.index("from_padded", x.device))


def own_heads(layout: Layout, count: int) -> slice:
    """Which of `count` heads `tokens_to_heads` gives to this rank."""
    share = count // layout.world_size
    begin = 0 if layout.alone else layout.rank * share
    return slice(begin, begin + share)


def heads_to_tokens(layout: Layout, x: Tensor) -> Tensor:
    """(tokens, N / P, D) of this rank's heads -> (local_tokens, N, D) of all heads."""
    size = layout.world_size
    if layout.alone:
        return x.repeat(1, size, 1)
    rows = x.index_select(0, layout.index("to_padded", x.device))
    by_rank = _exchange(layout, rows.unflatten(0, (size, -1)))
    return by_rank.transpose(0, 1).flatten(1, 2)[: layout.local_tokens]


def _exchange(layout: Layout, x: Tensor) -> Tensor:
    """Send x[i] to rank i, and receive one from each: (P, ...)."""
    each = [1] * layout.world_size
    return exchange(layout, x, each, each)


def exchange(layout: Layout, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
    """Send sent[i] rows of x to rank i, and receive received[i] rows from it, rank after rank."""
    rows = torch.ops._c10d_functional.all_to_all_single(x, received, sent, layout.group_name)
    return torch.ops._c10d_functional.wait_tensor(rows)


class GatherTokens(torch.autograd.Function):
    """(local_tokens, ...) -> (tokens, ...); the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, x.dtype
        rows = gather(layout, x)
        # An output of a Function that is its input would be a view of it.
        return rows.clone() if rows is x else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(ctx.layout, d.to(sum_dtype(d))).to(ctx.dtype), None


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, or one is the other detached.

    Not by the address: tensors without elements share it.
    """
    return x is y or (
        x.untyped_storage()._cdata == y.untyped_storage()._cdata
        and (x.storage_offset(), x.shape, x.stride()) == (y.storage_offset(), y.shape, y.stride())
        and x.dtype == y.dtype
    )


@dataclass
class _Entry:
    local: Tensor  # keeps its memory from being used for other keys
    version: int
    dtype: torch.dtype  # in which they travel
    on_the_way: Tensor | None
    arrived: Tensor | None = None


class GatheredKeys:
    """The keys that were gathered last.

    The indexer, the attention and the loss of a layer read the same keys, which travel once. Each
    kind of key has one entry, so that the keys of one layer are kept and no more.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        # torch keeps the tensors of a collective until something waits for it. Keys may be
        # prefetched for a call that never comes.
        weakref.finalize(self, _finish, self._entries).atexit = False

    def has(self, kind: str, x: Tensor, dtype: torch.dtype) -> bool:
        entry = self._entries.get(kind)
        return (
            entry is not None
            and not x.is_inference()
            and same_memory(entry.local, x)
            and (entry.version, entry.dtype) == (x._version, dtype)
        )

    def start(self, layout: Layout, kind: str, x: Tensor, sent: Tensor) -> None:
        """Begin to gather `sent`, which is x in its dtype of the call, unless that was done."""
        if self.has(kind, x, sent.dtype):
            return
        self.drop(layout, kind)
        rows = start_gather(layout, sent.detach())
        # A write to an inference tensor would go unnoticed: this call alone may use its rows.
        version = -1 if x.is_inference() else x._version
        self._entries[kind] = _Entry(x.detach(), version, sent.dtype, rows)

    def take(self, layout: Layout, kind: str, x: Tensor) -> Tensor:
        """Return x of all tokens: what `start` began to gather, which is kept."""
        # Compiled code gathers again: the compiler merges equal collectives by itself.
        entry = None if is_compiling() else self._entries.get(kind)
        if entry is None:
            return gather(layout, x)
        if entry.on_the_way is not None:
            entry.arrived, entry.on_the_way = finish_gather(layout, entry.on_the_way), None
        assert entry.arrived is not None
        return entry.arrived

    def drop(self, layout: Layout, kind: str) -> None:
        entry = self._entries.pop(kind, None)
        if entry is not None and entry.on_the_way is not None:
            finish_gather(layout, entry.on_the_way)


def _finish(entries: dict[str, _Entry]) -> None:
    for entry in entries.values():
        if entry.on_the_way is not None:
            torch.ops._c10d_functional.wait_tensor(entry.on_the_way)
