"""Dense attention with its sequences spread over the ranks of a group."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

import ascend_attn_ops as ops
from ascend_attn_ops._arguments import check_count, shown, wrong
from ascend_attn_ops._dense_attention import default_scale
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops._statistics import LANES, by_token
from ascend_attn_ops.device_limits import LimitsOfCall, limits_in_force
from ascend_attn_ops.distributed._agreement import collective
from ascend_attn_ops.distributed._communication import heads_to_tokens, own_heads, tokens_to_heads
from ascend_attn_ops.distributed._guard import Named, batch_first, guard, without_autocast
from ascend_attn_ops.distributed._operations import DenseAttention, dense_gradients
from ascend_attn_ops.distributed._parts import distinct, run, saved_tensors
from ascend_attn_ops.distributed._ring import Ring
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
        query: local tokens, (T, N, D), or (1, T, N, D) in layout BSND.
        key: local tokens, (T, Nk, D) or (1, T, Nk, D); query's dtype. Nk divides N.
        value: local tokens, (T, Nk, Dv) or (1, T, Nk, Dv), Dv <= D; query's dtype.
        num_heads: N.
        shards: which tokens are local.
        layout: "TND", or "BSND" with a batch of one, whose S axis is that of the T local tokens.
        method: "allgather" gathers key and value: the results are those of one process bit for bit,
            and every rank needs memory for all keys. "ring" passes them from rank to rank and
            merges the results, each rounded to query's dtype: sparse_mode 0, 2 and 3, not under
            torch.compile. "ulysses" exchanges tokens for heads: the number of ranks must divide N
            and Nk.
        scale_value: factor of the scores; None for 1 / sqrt(D), with ropes 1 / sqrt(D + Dr).
        pre_tokens: sparse_mode 4: how many keys before the diagonal are kept.
        next_tokens: how many after it. Neither may be negative.
        inner_precise: as in the operator.
        sparse_mode: 0, all keys; 2 and 3, causal; 4, a band.
        save_gathered: "allgather": keep the keys of all ranks for the backward, instead of
            gathering them again.
        sink: (N), the attention sinks of all heads, the same on all ranks. It is counted once,
            however many ranks have keys. Its gradient on a rank is that of the local tokens: sum
            it over the ranks, as the gradients of all parameters.
        query_rope: the rotary part of the local queries as a separate tensor, query's shape with Dr
            instead of D. Requires key_rope.
        key_rope: the rotary part of the local keys, with key's heads. It travels with key.

    Returns:
        out, with query's shape and head size Dv; softmax_max and softmax_sum, float32 (float64 for
        float64 inputs), each value eight times: (T, N, 8), token after token also where the
        operator's own order is another, or (1, N, T, 8) in BSND.

    Raises:
        As :func:`lightning_indexer`, and ValueError for numbers of heads that "ulysses" cannot
        spread; NotImplementedError for a sparse_mode that the method does not have.

    Example:
        >>> import torch
        >>> from ascend_attn_ops import distributed
        >>> shards = distributed.SequenceShards([6, 9])  # of a group of one rank
        >>> def local(*shape):
        ...     return torch.randn(shards.local_tokens, *shape, dtype=torch.bfloat16)
        >>> out, *statistics = distributed.flash_attention_score(
        ...     local(4, 64), local(2, 64), local(2, 64), num_heads=4, shards=shards,
        ...     sparse_mode=3, method="ring")
        >>> out.shape
        torch.Size([15, 4, 64])
    """
    # A sequence has as many queries as keys.
    mode = 3 if sparse_mode == 2 else sparse_mode
    if scale_value is None:
        scale_value = default_scale(query, num_heads, layout, query_rope)
    _check_method(method, sparse_mode, pre_tokens, next_tokens)
    operation = DenseAttention(num_heads, scale_value, mode, pre_tokens, next_tokens, inner_precise)
    if isinstance(sink, Tensor) and sink.is_floating_point():
        sink = sink.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    keys = {"key": key, "value": value, "key_rope": key_rope}
    of_tokens = {"query": query, "query_rope": query_rope}
    if method == "ulysses":
        _check_heads(num_heads, {**of_tokens, **keys}, shards.world_size)
        _check_sink(num_heads, sink)
    ranks = shards.world_size if method == "ulysses" else 1
    own, seen = guard(
        replace(operation, ranks=ranks), shards, layout,
        queries={**of_tokens, "sink": sink}, keys=keys,
        options={"method": method, "save_gathered": save_gathered},
    )  # fmt: skip
    with without_autocast(shards):
        if method == "allgather" or shards.tokens == 0:
            outputs = run(operation, shards, save_gathered, own, seen)
        else:
            function = Ring if method == "ring" else _Ulysses
            outputs = function.apply(operation, shards, *distinct([*own, *seen]))
    out, *statistics = outputs
    if layout == "BSND":
        statistics = [x.transpose(0, 1).unsqueeze(0) for x in statistics]
    return batch_first(out, layout), *statistics


def _check_method(method: str, sparse_mode: int, pre_tokens: int, next_tokens: int) -> None:
    if method not in ("allgather", "ring", "ulysses"):
        raise ValueError(
            f"{_WHERE}: method: expected 'allgather', 'ring' or 'ulysses', got {shown(method)}"
        )
    modes = (0, 2, 3) if method == "ring" else (0, 2, 3, 4)
    if sparse_mode not in modes:
        raise NotImplementedError(
            f"{_WHERE}: sparse_mode: expected one of {modes} with shards and method {method!r}, "
            f"got {shown(sparse_mode)}"
        )
    if method == "ring" and is_compiling():
        raise NotImplementedError(
            f"{_WHERE}: method: expected 'allgather' or 'ulysses' under torch.compile, got 'ring'"
        )
    if sparse_mode == 4 and min(pre_tokens, next_tokens) < 0:
        raise NotImplementedError(
            f"{_WHERE}: pre_tokens: expected none negative of pre_tokens and next_tokens with "
            f"shards, got {pre_tokens} and {next_tokens}"
        )


def _check_heads(num_heads: int, tensors: Named, ranks: int) -> None:
    heads = {"num_heads": check_count(_WHERE, "num_heads", num_heads)}
    # The operator refuses other ranks of tensors.
    heads |= {name: x.shape[-2] for name, x in tensors.items() if x is not None and x.dim() > 2}
    for argument, count in heads.items():
        if count % ranks:
            raise ValueError(
                f"{_WHERE}: {argument}: expected a number of heads that the {ranks} ranks divide "
                f"(method 'ulysses'), got {count}"
            )


def _check_sink(num_heads: int, sink: Tensor | None) -> None:
    """Checks what a rank's share of the sink no longer shows."""
    if isinstance(sink, Tensor) and list(sink.shape) != [num_heads]:
        expected = f"shape ({num_heads}), one score per query head"
        raise wrong(ValueError, _WHERE, "sink", expected, str(list(sink.shape)))


class _Ulysses(torch.autograd.Function):
    """Tokens of all heads become heads of all tokens, and back."""

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
        own = None if sink is None else sink[own_heads(shards, operation.num_heads)]
        given = (query, query_rope, *keys)
        heads: list[Any] = [x if x is None else tokens_to_heads(shards, x) for x in given]
        of_query, of_rope, key, value, key_rope = heads
        ends = list(accumulate(shards.lengths))
        # Dynamo of torch 2.10 cannot unpack vars(operation).
        options: dict[str, Any] = {
            "num_heads": operation.num_heads // shards.world_size,
            "layout": "TND",
            "actual_seq_lengths_query": ends,
            "actual_seq_lengths_key": ends,
            "scale_value": operation.scale_value,
            "sparse_mode": operation.sparse_mode,
            "pre_tokens": operation.pre_tokens,
            "next_tokens": operation.next_tokens,
            "inner_precise": operation.inner_precise,
        }
        out, softmax_max, softmax_sum = ops.flash_attention_score(
            of_query, key, value, sink=own, query_rope=of_rope, key_rope=key_rope, **options
        )
        ctx.save_for_backward(
            of_query, of_rope, own, key, value, key_rope, out, softmax_max, softmax_sum
        )
        ctx.operation, ctx.shards, ctx.options = operation, shards, options
        ctx.limits = limits_in_force()
        # Packed, the statistics of a sequence are ordered by heads. All lanes are alike.
        lanes = (by_token(x[..., :1], ends) for x in (softmax_max, softmax_sum))
        statistics = [heads_to_tokens(shards, x).expand(-1, -1, LANES).contiguous() for x in lanes]
        ctx.mark_non_differentiable(*statistics)
        return heads_to_tokens(shards, out), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_tensors(ctx)
        queries, keys, (out, softmax_max, softmax_sum) = saved[:3], saved[3:6], saved[6:]
        d_heads = tokens_to_heads(ctx.shards, d_out)
        with LimitsOfCall(ctx.limits):
            (*d_queries, d_own), d_seen = dense_gradients(
                queries, keys, d_heads, softmax_max, softmax_sum, out, ctx.options
            )
        d_query, d_query_rope, *d_keys = (
            x if x is None else heads_to_tokens(ctx.shards, x) for x in (*d_queries, *d_seen)
        )
        d_sink = None
        if d_own is not None:
            heads = ctx.operation.num_heads
            d_sink = d_own.new_zeros(heads)
            d_sink[own_heads(ctx.shards, heads)] = d_own
        return None, None, d_query, d_query_rope, d_sink, *d_keys
