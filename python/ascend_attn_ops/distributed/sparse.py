"""DeepSeek Sparse Attention with its sequences spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_attn_ops._core.arguments import check_count, check_flag, check_tensor, wrong
from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE
from ascend_attn_ops.distributed._agreement import collective
from ascend_attn_ops.distributed._guard import batch_first, guard, send_ahead, without_autocast
from ascend_attn_ops.distributed._layout import GatheredKeys, Rows, sum_dtype
from ascend_attn_ops.distributed._operations import (
    Indexer,
    IndexerLoss,
    IndexerLossWithTarget,
    SparseAttention,
    Tensors,
)
from ascend_attn_ops.distributed._parts import Keys, names_and_tensors, run, sum_gradients
from ascend_attn_ops.distributed.shards import SequenceShards
from ascend_attn_ops.ops._indexer_loss import (
    check_attention,
    check_divisor,
    check_no_target,
    normalized,
    one_for_zero,
)


class _GroupLoss(torch.autograd.Function):
    """The loss of all ranks' tokens. Its backward communicates nothing.

    The operator has the gradients with the loss. That of the keys is summed over the ranks at once,
    since kept for the backward it would have the size of all keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operation: IndexerLoss,
        shards: SequenceShards,
        ahead: Mapping[str, GatheredKeys],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        queries, local = operation.split(given)
        keys = Keys(operation, shards, local, ahead)
        trained = operation.TRAINED
        losses = []

        def gradients(part: Rows, x: Tensors) -> Tensors:
            *found, loss = operation.forward(part, x)
            losses.append(loss[0])
            return dict(zip(trained, found, strict=True))

        found = sum_gradients(shards, queries, keys, trained, gradients)
        like = given["query_index"]
        total = sum(losses, start=like.new_zeros((), dtype=sum_dtype(like)))
        if any(ctx.needs_input_grad):
            found["key_index"] = keys.sources["key_index"].collect(found["key_index"])
            ctx.save_for_backward(*(found[name] for name in trained))
            ctx.names, ctx.trained = names, trained
            ctx.dtypes = [given[name].dtype for name in trained]
        return shards.all_reduce(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        scaled = {
            # Multiplied in fp32: for a mean over many tokens, d is small.
            name: (x * d).to(dtype)
            for name, x, dtype in zip(ctx.trained, ctx.saved_tensors, ctx.dtypes, strict=True)
        }
        return None, None, None, None, *(scaled.get(name) for name in ctx.names)


@collective
def prefetch(*keys: Tensor, shards: SequenceShards, layout: str = "TND") -> tuple[Any, ...]:
    """Begin to send keys to all ranks ahead of calls: :func:`lightning_indexer_kl_loss` shows it.

    A collective call. Pass what this returns to the indexer, the attention and the loss of a layer:
    the keys travel once, and while the host and the device go on.

    Args:
        keys: local tokens, (T, ...), or (1, T, ...) in layout BSND.
        shards: which tokens are local; `shards.compressed(cmp_ratio)` of compressed keys.
        layout: "TND", or "BSND" with a batch of one.

    Returns:
        For each tensor, what stands for it in the functions of this module. It holds the keys of
        all ranks as they are now, and gradients reach the tensor through it. Under torch.compile,
        where the compiler decides when to communicate, the tensors themselves.

    Raises:
        As :func:`lightning_indexer`.
    """
    return send_ahead("ascend::prefetch", shards, layout, keys)


@collective
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    shards: SequenceShards,
    layout: str = "TND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    return_values: bool = False,
    save_gathered: bool = False,
    cmp_ratio: int = 1,
) -> tuple[Tensor, Tensor]:
    """:func:`ascend_attn_ops.lightning_indexer` of local tokens, over the keys of all ranks.

    A collective call, as is its backward.

    Args:
        query, key, weights: of local tokens. With cmp_ratio above 1, key has the local compressed
            keys, those of `shards.compressed(cmp_ratio)`, and the values have no gradient.
        shards: which tokens are local.
        layout: "TND", or "BSND" with a batch of one, whose S axis is that of the T local tokens.
        sparse_mode: 0, every key of the sequence is visible; 3, causal.
        save_gathered: keep the keys of all ranks for the backward, instead of gathering them again.
        sparse_count, pre_tokens, next_tokens, return_values, cmp_ratio: as in the operator.

    Returns:
        sparse_indices, int32, (T, 1, K) or (1, T, 1, K): keys of all ranks, counted from the first
        of their sequence; and sparse_values: bit for bit what one process returns for these tokens.

    Raises:
        TypeError, ValueError, NotImplementedError: as the operator, and ValueError for tensors that
            do not have the local tokens of `shards`, for a device that the group does not
            communicate on, and for arguments that differ between ranks; NotImplementedError under
            torch.compile if a rank has no tokens. If one rank raises before it communicates, in
            the backward too, all ranks raise.

    Example:
        >>> import torch
        >>> from ascend_attn_ops import distributed
        >>> shards = distributed.SequenceShards([4, 2])  # of a group of one rank
        >>> query = torch.randn(shards.local_tokens, 8, 128, dtype=torch.bfloat16)
        >>> key = torch.randn(shards.local_tokens, 1, 128, dtype=torch.bfloat16)
        >>> weights = torch.rand(shards.local_tokens, 8, dtype=torch.bfloat16)
        >>> indices, _ = distributed.lightning_indexer(
        ...     query, key, weights, shards=shards, sparse_count=4)
        >>> indices[4, 0].tolist()  # the first token of the second sequence sees itself only
        [0, -1, -1, -1]
    """
    where = f"ascend::{Indexer.name}"
    cmp_ratio = check_count(where, "cmp_ratio", cmp_ratio, least=1)
    options = {
        "sparse_count": sparse_count, "sparse_mode": sparse_mode, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "return_values": return_values, "cmp_ratio": cmp_ratio,
    }  # fmt: skip
    deterministic = torch.are_deterministic_algorithms_enabled()
    recorded = return_values and torch.is_grad_enabled()
    if cmp_ratio > 1 and recorded and any(x.requires_grad for x in (query, key, weights)):
        expected = "1 where a gradient of the values is required"
        raise wrong(NotImplementedError, where, "cmp_ratio", expected, str(cmp_ratio))
    operation = Indexer(options, deterministic)
    # The selection alone has no gradient.
    with torch.set_grad_enabled(recorded):
        given, ahead = guard(
            operation, shards, layout, {"query": query, "weights": weights, "key": key},
            options={"deterministic": deterministic, "save_gathered": save_gathered},
        )  # fmt: skip
        indices, values = run(operation, shards, save_gathered, given, ahead)
    return batch_first(indices, layout), batch_first(values, layout) if return_values else values


@collective
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    *,
    shards: SequenceShards,
    scale_value: float,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout: str = "TND",
    sparse_mode: int = 3,
    deterministic: bool = False,
    save_gathered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`ascend_attn_ops.sparse_flash_attention` of local tokens, over the keys of all ranks.

    A collective call, as is its backward: key, value and key_rope are gathered, and their gradients
    summed over the ranks in float32. One tensor as key and value travels once.

    Args:
        query, key, value, query_rope, key_rope: of local tokens.
        sparse_indices: of the local tokens, (T, 1, K) or (1, T, 1, K). Keys, counted from
            the first of the sequence, on whichever rank they are.
        sparse_mode: 0, every key of the sequence is visible; 3, causal.
        shards, layout, save_gathered: as in :func:`lightning_indexer`.
        scale_value, sparse_block_size, deterministic: as in the operator.

    Returns:
        out, with query's shape and dtype; softmax_max and softmax_sum, float32 (float64 for float64
        inputs), (1, T, N1), or (1, 1, T, N1) in BSND: bit for bit what one process returns for
        these tokens.

    Raises:
        As :func:`lightning_indexer`.
    """
    if value is not key and not isinstance(value, GatheredKeys):
        check_tensor(f"ascend::{SparseAttention.name}", "value", value)
    options = {
        "scale_value": scale_value, "sparse_block_size": sparse_block_size,
        "sparse_mode": sparse_mode,
        # As of now: the backward may run when the switch stands otherwise.
        "deterministic": deterministic or torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    operation = SparseAttention(options)
    given, ahead = guard(
        operation, shards, layout,
        {
            "query": query, "sparse_indices": sparse_indices, "query_rope": query_rope,
            "key": key, "value": None if value is key else value, "key_rope": key_rope,
        },
        options={"save_gathered": save_gathered},
    )  # fmt: skip
    out, *statistics = run(operation, shards, save_gathered, given, ahead)
    softmax_max, softmax_sum = (batch_first(x.unsqueeze(0), layout) for x in statistics)
    return batch_first(out, layout), softmax_max, softmax_sum


@collective
def lightning_indexer_kl_loss(
    query: Tensor | None,
    key: Tensor | None,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    *,
    shards: SequenceShards,
    scale_value: float | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    layout: str = "TND",
    sparse_mode: int = 3,
    deterministic: bool = False,
    token_weight: Tensor | None = None,
    reduction: Literal["sum", "mean"] = "sum",
    normalizer: Tensor | float | None = None,
    target: Tensor | None = None,
    normalize_target: bool = False,
    cmp_ratio: int = 1,
) -> Tensor:
    """:func:`ascend_attn_ops.lightning_indexer_kl_loss` of the tokens of all ranks.

    A collective call; its backward communicates nothing. The loss is the same number on all ranks.
    Every rank calls backward on it, and gets the gradients of its own tokens: parameters that all
    ranks share want the sum of the ranks' gradients, not their mean.

    Args:
        query, key, query_index, key_index, weights, sparse_indices, query_rope, key_rope, target,
            token_weight: of local tokens. With cmp_ratio above 1, key_index has the local
            compressed keys of `shards.compressed(cmp_ratio)`.
        softmax_max, softmax_sum: from :func:`sparse_flash_attention` over the same keys.
        shards, layout: as in :func:`lightning_indexer`.
        sparse_mode: 3, causal; beside a target also 0.
        reduction: "sum" over the tokens of all ranks, or their "mean": the sum divided by their
            number, or by the sum of the weights of all ranks.
        normalizer: what the sum is divided by, the same on all ranks.
        scale_value, deterministic, normalize_target, cmp_ratio: as in
            :func:`ascend_attn_ops.lightning_indexer_kl_loss`.

    Returns:
        The loss in nats, shape (), float32 (float64 for float64 inputs).

    Raises:
        As :func:`lightning_indexer`.

    Example:
        >>> import torch
        >>> from ascend_attn_ops import distributed
        >>> shards = distributed.SequenceShards([4])  # of a group of one rank
        >>> def local(*shape):
        ...     return torch.zeros(shards.local_tokens, *shape, dtype=torch.bfloat16)
        >>> query, query_rope, latent, key_rope = map(local, (32, 32, 1, 1), (512, 64, 512, 64))
        >>> query[:], latent[0] = 1, 1  # all attention goes to the first token
        >>> q_index, k_index, weights = local(8, 128).requires_grad_(), local(1, 128), local(8)
        >>> k_index, latent, key_rope = distributed.prefetch(
        ...     k_index, latent, key_rope, shards=shards)
        >>> indices, _ = distributed.lightning_indexer(
        ...     q_index, k_index, weights, shards=shards, sparse_count=1024)
        >>> attention = {"query_rope": query_rope, "key_rope": key_rope, "scale_value": 192**-0.5}
        >>> out, *statistics = distributed.sparse_flash_attention(
        ...     query, latent, latent, indices, shards=shards, **attention)
        >>> loss = distributed.lightning_indexer_kl_loss(
        ...     query, latent, q_index, k_index, weights, indices, *statistics,
        ...     shards=shards, **attention, reduction="mean")
        >>> loss.backward()
        >>> round(loss.item(), 2)  # log(1 * 2 * 3 * 4) / 4: the indexer tells no keys apart
        0.79
    """
    check_divisor(reduction, normalizer)
    attention = {
        "query": query, "softmax_max": softmax_max, "softmax_sum": softmax_sum,
        "query_rope": query_rope, "key": key, "key_rope": key_rope,
    }  # fmt: skip
    check_attention(
        (query, key, softmax_max, softmax_sum, scale_value, query_rope, key_rope), target
    )
    options = {"sparse_mode": sparse_mode, "deterministic": deterministic}
    if target is None:
        check_no_target(normalize_target, cmp_ratio)
        operation = IndexerLoss({**options, "scale_value": scale_value})
    else:
        where = f"ascend::{IndexerLoss.name}"
        check_flag(where, "normalize_target", normalize_target)
        check_tensor(where, "sparse_indices", sparse_indices)
        options["cmp_ratio"] = check_count(where, "cmp_ratio", cmp_ratio, least=1)
        operation = IndexerLossWithTarget(options, bool(normalize_target))
    given, ahead = guard(
        operation, shards, layout,
        {
            "query_index": query_index, "weights": weights, "sparse_indices": sparse_indices,
            "target": target, "token_weight": token_weight, **attention, "key_index": key_index,
        },
        options={
            "normalize_target": bool(normalize_target), "reduction": reduction,
            # Reading a tensor's value would wait for its device.
            "normalizer": "a tensor" if isinstance(normalizer, Tensor) else normalizer,
        },
    )  # fmt: skip
    # A Function is told what requires grad even where autograd records nothing.
    learning = operation.TRAINED if torch.is_grad_enabled() else ()
    leaves = {name: x if x is None or name in learning else x.detach() for name, x in given.items()}
    with without_autocast(shards):
        loss = _GroupLoss.apply(operation, shards, ahead, *names_and_tensors(leaves))
    if reduction == "sum":
        return normalized(loss, normalizer)
    if token_weight is None:
        return loss / max(shards.tokens, 1)
    return loss / one_for_zero(shards.all_reduce(token_weight.detach().sum(dtype=loss.dtype)))
