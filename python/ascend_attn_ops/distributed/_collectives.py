"""Tokens between ranks: functional collectives, which torch.compile traces as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from ascend_attn_ops.distributed.shards import SequenceShards


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the ranks' gradients of x are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def start_gather(shards: SequenceShards, x: Tensor) -> Tensor:
    """Send the local tokens (local_tokens, ...) to all ranks: padded rows, still on their way."""
    padded = pad(shards, x)
    if shards.world_size == 1 or shards._width == 0:
        return padded
    where = (shards.world_size, shards._group_name)
    functional = torch.ops._c10d_functional
    # Two all-gathers under way at once corrupt gloo's memory (seen with torch 2.13 and 2.14) where
    # they allocate their output. So they do not allocate it, or, in a graph, wait for each other.
    if is_compiling():
        rows = functional.all_gather_into_tensor(padded, *where)
        return functional.wait_tensor(rows) if x.device.type == "cpu" else rows
    rows = padded.new_empty(shards.world_size * len(padded), *padded.shape[1:])
    return functional.all_gather_into_tensor_out(padded, *where, out=rows)


def finish_gather(shards: SequenceShards, rows: Tensor) -> Tensor:
    """Wait for the tokens of all ranks, and put them into the order of the batch: (tokens, ...)."""
    if shards.world_size == 1 or shards._width == 0:
        return rows
    rows = torch.ops._c10d_functional.wait_tensor(rows)
    return rows.index_select(0, shards._index("from_padded", rows.device))


def gather(shards: SequenceShards, x: Tensor) -> Tensor:
    return finish_gather(shards, start_gather(shards, x))


def reduce_scatter(shards: SequenceShards, x: Tensor) -> Tensor:
    """Sum (tokens, ...) over the ranks, and keep the local tokens."""
    if shards.world_size == 1 or shards._width == 0:
        return x
    # Rows of padding carry token 0, and are cut off at the end.
    rows = x.index_select(0, shards._index("to_padded", x.device))
    mine = torch.ops._c10d_functional.reduce_scatter_tensor(
        rows, "sum", shards.world_size, shards._group_name
    )
    return torch.ops._c10d_functional.wait_tensor(mine)[: shards.local_tokens]


def all_reduce(shards: SequenceShards, x: Tensor) -> Tensor:
    """Sum over the ranks."""
    if shards.world_size == 1:
        return x
    total = torch.ops._c10d_functional.all_reduce(x, "sum", shards._group_name)
    return torch.ops._c10d_functional.wait_tensor(total)


def tokens_to_heads(shards: SequenceShards, x: Tensor) -> Tensor:
    """(local_tokens, N, D) of all heads -> (tokens, N / P, D) of this rank's heads."""
    size = shards.world_size
    if size == 1 or shards._width == 0:
        return x[:, : x.shape[1] // size]
    by_rank = pad(shards, x).unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    rows = _exchange(shards, by_rank).flatten(0, 1)
    return rows.index_select(0, shards._index("from_padded", x.device))


def heads_to_tokens(shards: SequenceShards, x: Tensor) -> Tensor:
    """(tokens, N / P, D) of this rank's heads -> (local_tokens, N, D) of all heads."""
    size = shards.world_size
    if size == 1 or shards._width == 0:
        return x.repeat(1, size, 1)
    rows = x.index_select(0, shards._index("to_padded", x.device))
    by_rank = _exchange(shards, rows.unflatten(0, (size, -1)))
    return by_rank.transpose(0, 1).flatten(1, 2)[: shards.local_tokens]


def _exchange(shards: SequenceShards, x: Tensor) -> Tensor:
    """Send x[i] to rank i, and receive one from each: (P, ...)."""
    each = [1] * shards.world_size
    received = torch.ops._c10d_functional.all_to_all_single(x, each, each, shards._group_name)
    return torch.ops._c10d_functional.wait_tensor(received)


def pad(shards: SequenceShards, x: Tensor) -> Tensor:
    missing = shards._width - x.shape[0]
    if missing == 0:
        return x.contiguous()
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


class GatherTokens(torch.autograd.Function):
    """(local_tokens, ...) -> (tokens, ...); the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: SequenceShards) -> Tensor:
        ctx.shards, ctx.dtype = shards, x.dtype
        rows = gather(shards, x)
        # An output of a Function that is its input would be a view of it.
        return rows.clone() if rows is x else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(ctx.shards, d.to(sum_dtype(d))).to(ctx.dtype), None


class ExchangeHeads(torch.autograd.Function):
    """Tokens of all heads to heads of all tokens, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: SequenceShards, to_heads: bool) -> Tensor:
        ctx.shards, ctx.to_heads = shards, to_heads
        y = (tokens_to_heads if to_heads else heads_to_tokens)(shards, x)
        return y.clone() if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return (heads_to_tokens if ctx.to_heads else tokens_to_heads)(ctx.shards, d), None, None
