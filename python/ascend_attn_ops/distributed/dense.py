"""Dense attention with its sequences spread over the ranks of a group."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

import ascend_attn_ops as ops
from ascend_attn_ops._arguments import shown
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops._statistics import LANES, by_head
from ascend_attn_ops.distributed._communication import ExchangeHeads, heads_to_tokens
from ascend_attn_ops.distributed._guard import batch_first, guard, tokens_first
from ascend_attn_ops.distributed._operations import DenseAttention
from ascend_attn_ops.distributed._parts import distinct, run
from ascend_attn_ops.distributed._ring import Ring
from ascend_attn_ops.distributed.shards import SequenceShards

Method = Literal["allgather", "ring", "ulysses"]


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
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`ascend_attn_ops.flash_attention_score` of local tokens, over the keys of all ranks.

    A collective call, as is its backward. Differentiable with respect to query, key and value.
    Position biases, masks as tensors, prefixes and dropout are not supported.

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
        scale_value: factor of the scores; None for 1 / sqrt(D).
        pre_tokens: sparse_mode 4: how many keys before the diagonal are kept.
        next_tokens: how many after it. Neither may be negative.
        inner_precise: as in the operator.
        sparse_mode: 0, all keys; 2 and 3, causal; 4, a band.
        save_gathered: "allgather": keep the keys of all ranks for the backward, instead of
            gathering them again.

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
        scale_value = (query.shape[-1] if query.dim() else 1) ** -0.5
    operation = DenseAttention(num_heads, scale_value, mode, pre_tokens, next_tokens, inner_precise)
    ranks = shards.world_size if method == "ulysses" else 1

    def checked(x: Tensor) -> Tensor:
        """The heads that one call of the operator has; what is malformed is refused later."""
        return x[..., : x.shape[-2] // ranks, :] if isinstance(x, Tensor) and x.dim() > 1 else x

    given = {"query": query, "key": key, "value": value}

    def check() -> None:
        _check_method(method, sparse_mode, pre_tokens, next_tokens)
        heads = {name: x.shape[-2] if x.dim() > 2 else num_heads for name, x in given.items()}
        _check_heads(method, heads, shards)

    guard(
        replace(operation, num_heads=num_heads // ranks), shards, layout,
        queries={"query": checked(query)}, keys={"key": checked(key), "value": checked(value)},
        options={"method": method}, check=check,
    )  # fmt: skip
    local = distinct([tokens_first(x, layout) for x in given.values()])
    if method == "allgather" or shards.tokens == 0:
        outputs = run(operation, shards, save_gathered, local[:1], local[1:])
    elif method == "ring":
        outputs = Ring.apply(operation, shards, *local)
    else:
        outputs = _ulysses(operation, shards, *local)
    out, *statistics = outputs
    if layout == "BSND":
        statistics = [x.transpose(0, 1).unsqueeze(0) for x in statistics]
    return batch_first(out, layout), *statistics


def _check_method(method: str, sparse_mode: int, pre_tokens: int, next_tokens: int) -> None:
    where = f"ascend::{DenseAttention.name}"
    if method not in ("allgather", "ring", "ulysses"):
        raise ValueError(
            f"{where}: method: expected 'allgather', 'ring' or 'ulysses', got {shown(method)}"
        )
    modes = (0, 2, 3) if method == "ring" else (0, 2, 3, 4)
    if sparse_mode not in modes:
        raise NotImplementedError(
            f"{where}: sparse_mode: expected one of {modes} with shards and method {method!r}, "
            f"got {sparse_mode}"
        )
    if method == "ring" and is_compiling():
        raise NotImplementedError(
            f"{where}: method: expected 'allgather' or 'ulysses' under torch.compile, got 'ring'"
        )
    if sparse_mode == 4 and min(pre_tokens, next_tokens) < 0:
        raise NotImplementedError(
            f"{where}: pre_tokens: expected none negative of pre_tokens and next_tokens with "
            f"shards, got {pre_tokens} and {next_tokens}"
        )


def _check_heads(method: str, heads: dict[str, int], shards: SequenceShards) -> None:
    for argument, count in heads.items() if method == "ulysses" else ():
        if count % shards.world_size:
            raise ValueError(
                f"ascend::{DenseAttention.name}: {argument}: expected a number of heads that the "
                f"{shards.world_size} ranks divide (method 'ulysses'), got {count}"
            )


def _ulysses(
    operation: DenseAttention, shards: SequenceShards, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Tokens of all heads become heads of all tokens, and back."""
    of_my_heads = [ExchangeHeads.apply(x, shards, True) for x in (query, key, value)]
    ends = list(accumulate(shards.lengths))
    out, *statistics = ops.flash_attention_score(
        *of_my_heads,
        num_heads=operation.num_heads // shards.world_size, layout="TND",
        scale_value=operation.scale_value, sparse_mode=operation.sparse_mode,
        pre_tokens=operation.pre_tokens, next_tokens=operation.next_tokens,
        inner_precise=operation.inner_precise,
        actual_seq_lengths_query=ends, actual_seq_lengths_key=ends,
    )  # fmt: skip
    with torch.no_grad():
        # Packed, the statistics of a sequence are ordered by heads. All lanes are alike.
        lanes = [by_head(x[..., :1], ends).transpose(0, 1) for x in statistics]
        statistics = [heads_to_tokens(shards, x).expand(-1, -1, LANES).contiguous() for x in lanes]
    return ExchangeHeads.apply(out, shards, False), *statistics
