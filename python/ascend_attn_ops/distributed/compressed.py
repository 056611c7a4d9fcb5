"""DeepSeek-V4's attention with its sequences spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import (
    check_count,
    check_factor,
    check_flag,
    check_tensor,
    shown,
    wrong,
)
from ascend_attn_ops.distributed._agreement import collective
from ascend_attn_ops.distributed._guard import batch_first, guard
from ascend_attn_ops.distributed._layout import Gather, Rows
from ascend_attn_ops.distributed._operations import (
    AttentionWithLoss,
    CompressedAttention,
    Compression,
)
from ascend_attn_ops.distributed._parts import run
from ascend_attn_ops.distributed.shards import SequenceShards
from ascend_attn_ops.nn.compression import compress_keys as compress_packed_keys


@collective
def compress_keys(
    values: Tensor,
    logits: Tensor,
    position_bias: Tensor,
    *,
    shards: SequenceShards,
    overlap: bool = False,
    layout: str = "TND",
) -> Tensor:
    """:func:`ascend_attn_ops.compress_keys` of local tokens.

    A collective call, as is its backward. A window of tokens that several ranks hold is compressed
    once, by the rank that holds the last of them: `shards.compressed(position_bias.shape[0])` says
    which keys a rank gets. The others send it their tokens of the window.

    Args:
        values, logits, overlap: as in the namesake, of local tokens.
        position_bias: (r, F), the same on all ranks. Its gradient on a rank is that of the local
            keys: sum it over the ranks, as the gradients of all parameters.
        shards, layout: as in :func:`lightning_indexer`.

    Returns:
        The local compressed keys, (W, D), or (1, W, D) in layout BSND, before their norm and rope:
        bit for bit those of one process.

    Raises:
        As :func:`lightning_indexer`.

    Example:
        >>> import torch
        >>> from ascend_attn_ops import distributed
        >>> shards = distributed.SequenceShards([10])  # of a group of one rank
        >>> values, logits = torch.randn(2, shards.local_tokens, 16)
        >>> keys = distributed.compress_keys(values, logits, torch.zeros(4, 16), shards=shards)
        >>> keys.shape
        torch.Size([2, 16])
        >>> (shards.compressed(4).positions() * 4).tolist()  # for their rotary embedding
        [0, 4]
    """
    check_flag(f"ascend::{Compression.name}", "overlap", overlap)
    overlap = bool(overlap)
    tensors = {"values": values, "logits": logits, "position_bias": position_bias}
    given, _ = guard(Compression({"overlap": overlap}), shards, layout, tensors, options={})
    ratio = len(position_bias)

    def windows(part: Rows) -> tuple[int, int]:
        """The tokens of the keys that a part makes."""
        first, last = part.begin // ratio, part.end // ratio
        return (max(first - overlap, 0) * ratio if first < last else last * ratio), last * ratio

    ranges = shards._ranges_around(("windows", ratio, overlap), windows)
    counts = [(end - begin) // ratio for begin, end in ranges.wanted]
    keys = compress_packed_keys(
        Gather.apply(given["values"], ranges), Gather.apply(given["logits"], ranges),
        position_bias, overlap=overlap,
        actual_seq_lengths=list(accumulate(count * ratio for count in counts)),
    )  # fmt: skip
    own = [keys[:0]]
    for part, of_part in zip(shards.rows(), keys.split(counts), strict=True):
        # The window before the first key is the overlap's: its own key is of another part.
        begin, _ = ranges.wanted[part.number]
        own.append(of_part[1:] if begin < part.begin // ratio * ratio else of_part)
    return batch_first(torch.cat(own), layout)


@collective
def sparse_flash_mla(
    query: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    *,
    shards: SequenceShards,
    scale_value: float,
    sink: Tensor | None = None,
    cmp_ratio: int = 1,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 127,
    ori_win_right: int = 0,
    layout: str = "TND",
    deterministic: bool = False,
    save_gathered: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`ascend_attn_ops.sparse_flash_mla` of local tokens, over the keys of all ranks.

    A collective call, as is its backward. A rank gets the original keys in the windows of its
    tokens, and the compressed keys of all ranks. Gradients are summed over the ranks in float32.

    Args:
        query, ori_kv: of local tokens.
        cmp_kv: the local compressed keys of :func:`compress_keys`, those of
            `shards.compressed(cmp_ratio)`. All ranks pass them, or none.
        cmp_sparse_indices: of the local tokens, counted from the first key of the sequence, on
            whichever rank it is. The first min(K, n) must not name keys that only later parts see.
        sink: (N1,), the same on all ranks. Its gradient on a rank is that of the local tokens: sum
            it over the ranks, as the gradients of all parameters.
        shards, layout, save_gathered: as in :func:`lightning_indexer`.
        scale_value, cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right,
            deterministic: as in the operator. In a mode, or with a window, that has no bounds, all
            original keys are gathered.

    Returns:
        out, with query's shape and dtype; softmax_lse, float32 (float64 for float64 inputs),
        (1, T, N1), or (1, 1, T, N1) in BSND.

    Raises:
        As :func:`lightning_indexer`.
    """
    options = _attention(
        CompressedAttention.name, ori_kv, scale_value=scale_value, cmp_ratio=cmp_ratio,
        ori_mask_mode=ori_mask_mode, cmp_mask_mode=cmp_mask_mode, ori_win_left=ori_win_left,
        ori_win_right=ori_win_right, deterministic=deterministic,
    )  # fmt: skip
    operation = CompressedAttention(options)
    given, ahead = guard(
        operation, shards, layout,
        {
            "query": query, "cmp_sparse_indices": cmp_sparse_indices, "sink": sink,
            "ori_kv": ori_kv, "cmp_kv": cmp_kv,
        },
        options={"save_gathered": save_gathered},
    )  # fmt: skip
    out, softmax_lse = run(operation, shards, save_gathered, given, ahead)
    return batch_first(out, layout), batch_first(softmax_lse.unsqueeze(0), layout)


def _attention(name: str, ori_kv: Tensor, **options: Any) -> dict[str, Any]:
    """The options of CompressedAttention; raises for what the operators see too late."""
    where = f"ascend::{name}"
    check_tensor(where, "ori_kv", ori_kv)
    for argument, least in (("cmp_ratio", 1), ("ori_win_left", -1), ("ori_win_right", -1)):
        options[argument] = check_count(where, argument, options[argument], least=least)
    # As of now: the backward may run when the switch stands otherwise.
    deterministic = options["deterministic"] or torch.are_deterministic_algorithms_enabled()
    return {**options, "deterministic": deterministic}


@collective
def sparse_flash_mla_with_indexer_loss(
    query: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor,
    cmp_sparse_indices: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    shards: SequenceShards,
    scale_value: float,
    indexer_loss_weight: float | Tensor = 1.0,
    on_loss: Callable[[Tensor], None] | None = None,
    sink: Tensor | None = None,
    cmp_ratio: int = 4,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 127,
    ori_win_right: int = 0,
    layout: str = "TND",
    deterministic: bool = False,
    save_gathered: bool = False,
) -> Tensor:
    """:func:`ascend_attn_ops.sparse_flash_mla_with_indexer_loss` of local tokens.

    A collective call, as is its backward. The loss is that of the tokens of all ranks, and each
    rank gets the gradients of its own: sum those of parameters that all ranks share.

    Args:
        query_index, key_index, weights: of local tokens; key_index of the local compressed keys.
        indexer_loss_weight: factor of the loss's gradient, the same on all ranks: for the mean over
            the tokens, 1 / `shards.tokens`. A tensor of one element is read in the backward.
        on_loss: called in the backward, on all ranks or on none, with the sum of the loss over the
            tokens of all ranks, (1,), without a gradient. Not under torch.compile.
        query, ori_kv, cmp_kv, cmp_sparse_indices, shards, scale_value, sink, cmp_ratio,
            ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right, layout, deterministic,
            save_gathered: as in :func:`sparse_flash_mla`.

    Returns:
        out, as of :func:`sparse_flash_mla`.

    Raises:
        As :func:`lightning_indexer`.

    Example:
        >>> import torch
        >>> from ascend_attn_ops import distributed
        >>> shards = distributed.SequenceShards([8])  # of a group of one rank
        >>> def local(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        >>> tokens, keys = shards.local_tokens, shards.compressed(4).local_tokens
        >>> indexer = local(tokens, 64, 128), local(keys, 1, 128), torch.rand(tokens, 64)
        >>> indices, _ = distributed.lightning_indexer(
        ...     *(x.detach() for x in indexer), shards=shards, sparse_count=512, cmp_ratio=4)
        >>> out = distributed.sparse_flash_mla_with_indexer_loss(
        ...     local(tokens, 64, 512), local(tokens, 1, 512), local(keys, 1, 512), indices,
        ...     *indexer, shards=shards, scale_value=512**-0.5, sink=torch.zeros(64),
        ...     indexer_loss_weight=1 / shards.tokens)
        >>> out.sum().backward()
        >>> indexer[0].grad.abs().amax((1, 2)).count_nonzero().item()  # token 7 alone has a choice
        1
    """
    where = f"ascend::{AttentionWithLoss.name}"
    check_factor(where, "indexer_loss_weight", indexer_loss_weight)
    if on_loss is not None and not callable(on_loss):
        raise wrong(TypeError, where, "on_loss", "a function or None", shown(on_loss))
    options = _attention(
        AttentionWithLoss.name, ori_kv, scale_value=scale_value, cmp_ratio=cmp_ratio,
        ori_mask_mode=ori_mask_mode, cmp_mask_mode=cmp_mask_mode, ori_win_left=ori_win_left,
        ori_win_right=ori_win_right, deterministic=deterministic,
    )  # fmt: skip
    indexer = {"query_index": query_index, "weights": weights}
    keys = {"ori_kv": ori_kv, "cmp_kv": cmp_kv, "key_index": key_index}
    selected = {"cmp_sparse_indices": cmp_sparse_indices}
    for argument, x in {**selected, **indexer, **keys}.items():
        check_tensor(where, argument, x)
    trained = torch.is_grad_enabled() and any(
        x.requires_grad for x in (query_index, key_index, weights)
    )
    weight = indexer_loss_weight if isinstance(indexer_loss_weight, Tensor) else None
    factor = None if isinstance(indexer_loss_weight, Tensor) else float(indexer_loss_weight)
    operation = AttentionWithLoss(options, trained, factor, on_loss, [])
    given, ahead = guard(
        operation, shards, layout,
        {
            "query": query, **selected, **indexer, "sink": sink, "indexer_loss_weight": weight,
            **keys,
        },
        options={
            "factor": factor, "save_gathered": save_gathered, "on_loss": on_loss is not None,
        },
    )  # fmt: skip
    out, _ = run(operation, shards, save_gathered, given, ahead)
    return batch_first(out, layout)
