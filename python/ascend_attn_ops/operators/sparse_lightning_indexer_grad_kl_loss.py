"""The KL loss that trains the LightningIndexer, with its gradients."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from ascend_attn_ops._arguments import check_flag, check_number, dtype_name, shown, whole, wrong
from ascend_attn_ops._operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._packing import Lengths

from ._loss_with_target import loss_with_target, tokens_of

_OPERATOR = Operator("sparse_lightning_indexer_grad_kl_loss")

_NAME = "ascend::lightning_indexer_kl_loss"


def sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    *,
    scale_value: float,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    deterministic: bool = False,
    token_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The KL loss that trains the indexer and its gradients, in one pass.

    To autograd this is a loss: ``loss`` is differentiable with respect to query_index, key_index
    and weights; the three gradient outputs are not differentiable. Most users want
    :func:`lightning_indexer_kl_loss`, which returns only the loss and documents the arguments.

    Args:
        pre_tokens, next_tokens: ignored in mode 3.

    Returns:
        d_query_index, d_key_index, d_weights, each with the shape and dtype of its tensor; and
        loss, (1,), float32 (float64 for float64 inputs): the sum over all tokens, in nats.

    Raises:
        As :func:`lightning_indexer_kl_loss`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def bfloat16(*shape):
        ...     return torch.randn(1, 8, *shape, dtype=torch.bfloat16)
        >>> query, latent = bfloat16(64, 512), bfloat16(1, 512)
        >>> options = {"scale_value": 192**-0.5, "query_rope": bfloat16(64, 64),
        ...            "key_rope": bfloat16(1, 64)}
        >>> indexer = bfloat16(8, 128), bfloat16(1, 128), bfloat16(8)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(*indexer)
        >>> _, *statistics = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, **options)
        >>> *_, d_weights, loss = ascend_attn_ops.sparse_lightning_indexer_grad_kl_loss(
        ...     query, latent, *indexer, indices, *statistics, **options)
        >>> d_weights.shape, loss.shape
        (torch.Size([1, 8, 8]), torch.Size([1]))

    Source: docs/specification/sparse_lightning_indexer_grad_kl_loss.md; CANN's document of
    aclnnSparseLightningIndexerGradKLLoss.
    """
    return _OPERATOR.call(
        query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum,
        scale_value, query_rope, key_rope, actual_seq_lengths_query, actual_seq_lengths_key, layout,
        sparse_mode, pre_tokens, next_tokens, deterministic, token_weight,
    )  # fmt: skip


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
    scale_value: float | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    deterministic: bool = False,
    token_weight: Tensor | None = None,
    reduction: Literal["sum", "mean"] = "sum",
    normalizer: Tensor | float | None = None,
    target: Tensor | None = None,
    normalize_target: bool = False,
    cmp_ratio: int = 1,
    cmp_residual_key: Tensor | None = None,
) -> Tensor:
    """The KL loss between the main attention and the indexer, a differentiable scalar.

    Over the keys selected for a query token, p is the attention averaged over the heads (the
    target) and y the softmax of the indexer's scores::

        loss = sum over tokens of sum p * (log p - log y)

    Gradients flow to query_index, key_index and weights; the attention is a fixed target.

    The target is computed from the attention's inputs and statistics; or, as in DeepSeek-V4, it is
    the `target` that you pass, with None for query, key and the statistics.

    Args:
        query: of the main attention, (B, S1, N1, D), or (T1, N1, D) in layout TND; float16 or
            bfloat16 (float32 and float64 as well when the device limits are off).
        key: (B, S2, 1, D) or (T2, 1, D); query's dtype.
        query_index: (B, S1, Nidx, Didx) or (T1, Nidx, Didx); query's dtype.
        key_index: (B, S2, 1, Didx) or (T2, 1, Didx); query's dtype.
        weights: (B, S1, Nidx) or (T1, Nidx); query's dtype or float32.
        sparse_indices: (B, S1, 1, K) or (T1, 1, K), also without the axis of heads. The keys
            selected for each token, counted from the first key of the sequence, padded with -1.
            For a selection with a tail of recent keys, pass the indexer's own K.
        softmax_max, softmax_sum: (B, 1, S1, N1) or (1, T1, N1); float32. From
            :func:`sparse_flash_attention` over the same keys: p is not renormalised, and with other
            statistics it does not sum to one.
        scale_value: factor of the main attention's scores, as in `sparse_flash_attention`; the
            indexer's scores have none.
        query_rope: (B, S1, N1, Dr) or (T1, N1, Dr); query's dtype. Pass both ropes or neither.
        key_rope: (B, S2, 1, Dr) or (T2, 1, Dr); query's dtype.
        actual_seq_lengths_query, actual_seq_lengths_key: as in :func:`lightning_indexer`.
        layout: "BSND" or "TND".
        sparse_mode: 3, causal, the last query sees up to the last key.
        deterministic: as in :func:`sparse_flash_attention`.
        token_weight: a factor of each token's loss and gradients, (B, S1) or (T1,): bool, False for
            padding and other masked tokens, or floating point. Tokens with factor 0 are not read.
            The NPU takes bool only.
        reduction: "sum" over the query tokens that belong to a sequence, or their "mean": the sum
            divided by their number, or by the sum of their weights.
        normalizer: what the sum is divided by, e.g. the number of valid tokens of all ranks; a
            tensor with one element is read on its device. Without tokens, 0 divided by 0 is 0.
            Instead of reduction="mean".
        target: p, as sparse_indices; float32 (float64 for float64 inputs), such as the last result
            of the attention's gradient. It may add up to less than 1: a row counts as much as that.
        normalize_target: divide each row of `target` by its sum, so that rows count alike.
        cmp_ratio, cmp_residual_key: as in :func:`lightning_indexer`; beside `target` only. Lengths
            in tensors are then read on the device, and sparse_mode may be 0.

    Returns:
        The loss in nats, shape (), float32 (float64 for float64 inputs).

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a target beside an attention, or neither; a shape, length, index, layout, mode,
            reduction or device limit is violated.
        NotImplementedError: the product in force has no such operator; a weight that is not bool,
            on the NPU, without `target`; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def bfloat16(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16)
        >>> query, query_rope = bfloat16(1, 4, 32, 512), bfloat16(1, 4, 32, 64)
        >>> latent, key_rope = bfloat16(1, 4, 1, 512), bfloat16(1, 4, 1, 64)
        >>> attention = {"scale_value": 192**-0.5, "query_rope": query_rope, "key_rope": key_rope}
        >>> query_index = bfloat16(1, 4, 64, 128).requires_grad_()
        >>> key_index, weights = bfloat16(1, 4, 1, 128), bfloat16(1, 4, 64)
        >>> indices, _ = ascend_attn_ops.lightning_indexer(query_index, key_index, weights)
        >>> _, softmax_max, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, **attention)
        >>> loss = ascend_attn_ops.lightning_indexer_kl_loss(
        ...     query, latent, query_index, key_index, weights, indices,
        ...     softmax_max=softmax_max, softmax_sum=softmax_sum, **attention, reduction="mean")
        >>> loss.backward()
        >>> query_index.grad.shape
        torch.Size([1, 4, 64, 128])

    Source: docs/specification/sparse_lightning_indexer_grad_kl_loss.md and
    docs/specification/sparse_lightning_indexer_kl_loss_grad.md.
    """
    check_divisor(reduction, normalizer)
    check_flag(_NAME, "normalize_target", normalize_target)
    attention = {
        "query": query, "key": key, "softmax_max": softmax_max, "softmax_sum": softmax_sum,
        "scale_value": scale_value,
    }  # fmt: skip
    check_attention({**attention, "query_rope": query_rope, "key_rope": key_rope}, target)
    if target is not None:
        loss = loss_with_target(
            query_index, key_index, weights, sparse_indices, target, token_weight, normalize_target,
            {
                "actual_seq_lengths_query": actual_seq_lengths_query,
                "actual_seq_lengths_key": actual_seq_lengths_key,
                "cmp_residual_key": cmp_residual_key, "layout": layout, "sparse_mode": sparse_mode,
                "cmp_ratio": cmp_ratio, "deterministic": deterministic,
            },
        )  # fmt: skip
    else:
        check_no_target(normalize_target, cmp_ratio, cmp_residual_key)
        attended = (cast("Tensor", x) for x in (query, key, softmax_max, softmax_sum))
        query, key, softmax_max, softmax_sum = attended
        *_, of_all = sparse_lightning_indexer_grad_kl_loss(
            query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum,
            scale_value=cast("float", scale_value), query_rope=query_rope, key_rope=key_rope,
            actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_key=actual_seq_lengths_key, layout=layout, sparse_mode=sparse_mode,
            deterministic=deterministic, token_weight=token_weight,
        )  # fmt: skip
        loss = of_all.squeeze(0)
    if reduction == "mean":
        return loss / tokens_of(
            query_index, actual_seq_lengths_query, layout, token_weight, loss.dtype
        )
    return normalized(loss, normalizer)


def check_attention(attention: dict[str, Tensor | float | None], target: Tensor | None) -> None:
    """Raises unless the target is given, or all of what it is computed from."""
    for name, x in attention.items():
        if target is not None and x is not None:
            raise wrong(ValueError, _NAME, name, "None beside a target", shown(x))
        if target is None and x is None and not name.endswith("_rope"):
            expected = "the attention's, or a target in place of the attention"
            raise wrong(ValueError, _NAME, name, expected, "None")


def check_no_target(
    normalize_target: bool, cmp_ratio: int, cmp_residual_key: Tensor | None = None
) -> None:
    """Raises for options that a loss without a target does not have."""
    of_target = (
        ("normalize_target", normalize_target, False, not normalize_target),
        ("cmp_ratio", cmp_ratio, 1, whole(cmp_ratio) == 1),
        ("cmp_residual_key", cmp_residual_key, None, cmp_residual_key is None),
    )
    for name, given, default, is_default in of_target:
        if not is_default:
            raise wrong(ValueError, _NAME, name, f"{default} without a target", shown(given))


def check_divisor(reduction: str, normalizer: Tensor | float | None) -> None:
    if not isinstance(reduction, str) or reduction not in ("sum", "mean"):
        raise wrong(ValueError, _NAME, "reduction", "'sum' or 'mean'", shown(reduction))
    if normalizer is None:
        return
    if reduction == "mean":
        expected = "None beside reduction='mean', which has its own"
        raise wrong(ValueError, _NAME, "normalizer", expected, shown(normalizer))
    if isinstance(normalizer, Tensor) and normalizer.numel() != 1:
        got = f"shape {tuple(normalizer.shape)}"
        raise wrong(ValueError, _NAME, "normalizer", "one element", got)
    check_number(_NAME, "normalizer", normalizer, read=False)


def normalized(loss: Tensor, normalizer: Tensor | float | None) -> Tensor:
    if normalizer is None:
        return loss
    if isinstance(normalizer, (torch.SymInt, torch.SymFloat)):
        return loss / normalizer
    if isinstance(normalizer, Tensor):
        # Two scalars would otherwise take the wider dtype.
        normalizer = normalizer.reshape(()).to(loss.dtype)
    else:
        # torch takes an int of 64 bits, and a number of numpy compares to one of its own.
        normalizer = float(normalizer)
        if normalizer != 0:
            numbers = torch.finfo(loss.dtype)
            # torch would round it to 0 in the loss's dtype, and 0 / 0 is NaN.
            if abs(normalizer) < numbers.tiny:
                expected = f"0 or a number that {dtype_name(loss.dtype)} holds"
                raise wrong(ValueError, _NAME, "normalizer", expected, shown(normalizer))
            return loss / normalizer
    # No rank has a token.
    nothing = (loss == 0) & (normalizer == 0)
    return loss / torch.where(nothing, 1, normalizer)


def one_for_zero(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1, total)
