"""Dense attention with its sequences spread over the ranks of a group, by three methods."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from ascend_attn_ops import ops
from ascend_attn_ops._core.arguments import shown, wrong
from ascend_attn_ops._core.device_limits import LimitsOfCall
from ascend_attn_ops._core.operators import ALL_TOKENS
from ascend_attn_ops._core.statistics import LANES, by_token, merge
from ascend_attn_ops.distributed._agreement import collective
from ascend_attn_ops.distributed._guard import batch_first, guard, without_autocast
from ascend_attn_ops.distributed._layout import Layout, Rows, sum_dtype
from ascend_attn_ops.distributed._operations import SHARED, DenseAttention, Tensors
from ascend_attn_ops.distributed._parts import (
    Keys,
    in_dtypes,
    names_and_tensors,
    run,
    run_parts,
    save,
    saved_tensors,
    zeros_for,
)
from ascend_attn_ops.distributed.shards import SequenceShards

Method = Literal["allgather", "ring", "ulysses"]
_WHERE = f"ascend::{DenseAttention.name}"


@collective
def flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    shards: SequenceShards,
    layout: str = "TND",
    method: Method = "allgather",
    scale_value: float | None = None,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    save_gathered: bool = False,
    sink: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`ascend_attn_ops.flash_attention_score` of local tokens, over the keys of all ranks.

    A collective call, as is its backward. Differentiable with respect to query, key, value, sink
    and ropes. Position biases, masks as tensors, prefixes and dropout are not supported.

    Args:
        query, key, value, query_rope, key_rope: of local tokens.
        method: "allgather" gathers key and value: the results are those of one process bit for bit,
            and every rank needs memory for all keys. "ring" passes them from rank to rank and
            merges the results, each rounded to query's dtype: sparse_mode 0, 2 and 3, not under
            torch.compile. "ulysses" exchanges tokens for heads: the number of ranks must divide N
            and Nk.
        pre_tokens, next_tokens: of sparse_mode 4; neither may be negative.
        sparse_mode: 0, all keys; 2 and 3, causal; 4, a band.
        sink: (N), the same on all ranks, and counted once. Its gradient on a rank is that of the
            local tokens: sum it over the ranks, as the gradients of all parameters.
        shards, layout, save_gathered: as in :func:`lightning_indexer`.
        num_heads, scale_value, inner_precise: as in the operator.

    Returns:
        out, with query's shape and head size Dv; softmax_max and softmax_sum, float32 (float64 for
        float64 inputs), each value eight times: (T, N, 8), token after token also where the
        operator's own order is another, or (1, N, T, 8) in BSND.

    Raises:
        As :func:`lightning_indexer`, and ValueError for numbers of heads that "ulysses" cannot
        spread; NotImplementedError for a sparse_mode that the method does not have.
    """
    _check_method(method, sparse_mode, pre_tokens, next_tokens)
    options: dict[str, Any] = {
        "num_heads": num_heads, "scale_value": scale_value, "inner_precise": inner_precise,
        # A sequence has as many queries as keys.
        "sparse_mode": 3 if sparse_mode == 2 else sparse_mode, "layout": "BSND",
    }  # fmt: skip
    if sparse_mode == 4:
        options.update(pre_tokens=pre_tokens, next_tokens=next_tokens)
    operation = DenseAttention(options)
    tensors = {
        "query": query, "query_rope": query_rope, "sink": sink,
        "key": key, "value": value, "key_rope": key_rope,
    }  # fmt: skip
    ranks = shards.world_size if method == "ulysses" else 1
    given, ahead = guard(
        replace(operation, ranks=ranks), shards, layout, tensors,
        options={"method": method, "save_gathered": save_gathered},
    )  # fmt: skip
    if method == "allgather" or shards.alone:
        out, *statistics = run(operation, shards, save_gathered, given, ahead)
    else:
        with without_autocast(shards):
            if method == "ulysses":
                out, *statistics = _ulysses(operation, shards, given)
            else:
                out, *statistics = _Ring.apply(operation, shards, *names_and_tensors(given))
    if layout == "BSND":
        statistics = [x.transpose(0, 1).unsqueeze(0) for x in statistics]
    return batch_first(out, layout), *statistics


def _check_method(method: str, sparse_mode: int, pre_tokens: int, next_tokens: int) -> None:
    if method not in ("allgather", "ring", "ulysses"):
        expected = "'allgather', 'ring' or 'ulysses'"
        raise wrong(ValueError, _WHERE, "method", expected, shown(method))
    modes = (0, 2, 3) if method == "ring" else (0, 2, 3, 4)
    if sparse_mode not in modes:
        expected = f"one of {modes} with shards and method {method!r}"
        raise wrong(NotImplementedError, _WHERE, "sparse_mode", expected, shown(sparse_mode))
    if method == "ring" and is_compiling():
        expected = "'allgather' or 'ulysses' under torch.compile"
        raise wrong(NotImplementedError, _WHERE, "method", expected, "'ring'")
    if sparse_mode == 4 and min(pre_tokens, next_tokens) < 0:
        expected = "none negative of pre_tokens and next_tokens with shards"
        got = f"{pre_tokens} and {next_tokens}"
        raise wrong(NotImplementedError, _WHERE, "pre_tokens", expected, got)


def _ulysses(operation: DenseAttention, shards: SequenceShards, given: Tensors) -> list[Tensor]:
    """Tokens of all heads become heads of all tokens, and back."""
    ranks, heads = shards.world_size, operation.options["num_heads"]
    x: dict[str, Any] = {
        name: y.chunk(ranks)[shards.rank] if name == "sink" else _Swap.apply(y, shards, True)
        for name, y in given.items()
        if y is not None
    }
    ends = list(accumulate(shards.lengths))
    packs = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends, "layout": "TND"}
    options = {**operation.options, **packs, "num_heads": heads // ranks}
    out, *statistics = ops.flash_attention_score(**x, **options)
    # Packed, the statistics of a sequence are ordered by heads. All lanes are alike.
    lanes = (_to_tokens(shards, by_token(y.detach()[..., :1], ends)) for y in statistics)
    statistics = [y.expand(-1, -1, LANES).contiguous() for y in lanes]
    return [_Swap.apply(out, shards, False), *statistics]


class _Swap(torch.autograd.Function):
    """Tokens of all heads become heads of all tokens, or the reverse, as the gradient does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: SequenceShards, to_heads: bool) -> Tensor:
        ctx.shards, ctx.to_heads = shards, to_heads
        return _to_heads(shards, x) if to_heads else _to_tokens(shards, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.to_heads else _to_heads)(ctx.shards, d), None, None


def _to_heads(layout: Layout, x: Tensor) -> Tensor:
    """(local_tokens, N, D) of all heads -> (tokens, N / P, D) of this rank's heads."""
    size = layout.world_size
    by_rank = layout.pad(x).unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    rows = layout.exchange(by_rank, [1] * size, [1] * size).flatten(0, 1)
    return rows.index_select(0, layout.index("from_padded", x.device))


def _to_tokens(layout: Layout, x: Tensor) -> Tensor:
    """(tokens, N / P, D) of this rank's heads -> (local_tokens, N, D) of all heads."""
    size = layout.world_size
    rows = x.index_select(0, layout.index("to_padded", x.device)).unflatten(0, (size, -1))
    by_rank = layout.exchange(rows, [1] * size, [1] * size)
    return by_rank.transpose(0, 1).flatten(1, 2)[: layout.local_tokens]


# out, softmax_max and softmax_sum of some queries, tokens first.
Result = tuple[Tensor, Tensor, Tensor]


def _merged(x: Result, y: Result) -> Result:
    """Attention over disjoint sets of keys -> over both."""
    maximum, total, (share_x, share_y) = merge(x[1:], y[1:])
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
    operation: DenseAttention,
    shards: Layout,
    source: int,
    queries: Tensors,
    keys: Tensors,
    seen: Container[int],
) -> Iterator[tuple[DenseAttention, Rows, slice, Tensors]]:
    """The work of this rank for the keys of `source`.

    Yields the operation, the part, the rows of its keys, and the tensors. The sink is only among
    those of parts that were not seen before.
    """
    causal = operation.causal
    of_all_keys = replace(operation, options={**operation.options, "sparse_mode": 0})
    for part in shards.rows():
        for theirs in shards.rows(source):
            if theirs.sequence != part.sequence or (causal and theirs.begin > part.begin):
                continue
            own = operation.queries(part, queries)
            if part.number in seen:
                own.pop("sink", None)
            rows = theirs.here
            x = {**own, **{name: y[rows].unsqueeze(0) for name, y in keys.items()}}
            # Parts are disjoint or one: only a part's own keys are cut by the diagonal.
            diagonal = causal and theirs.begin == part.begin
            yield operation if diagonal else of_all_keys, part, rows, x


class _Ring(torch.autograd.Function):
    """Keys and values go from rank to rank, and every rank merges what it computes."""

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
            for block, part, _, x in _blocks(operation, shards, source, queries, theirs, results):
                out, softmax_max, softmax_sum = block.forward(part, x)
                result = (out.to(sum_dtype(out)), softmax_max, softmax_sum)
                before = results.get(part.number)
                results[part.number] = result if before is None else _merged(before, result)
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
                for block, part, rows, x in _blocks(
                    operation, shards, source, queries, theirs, seen
                ):
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
