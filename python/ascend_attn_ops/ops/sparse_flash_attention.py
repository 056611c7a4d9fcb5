"""Attention over selected keys."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("sparse_flash_attention")


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    deterministic: bool = False,
    layout_kv: str | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query token over the keys that `sparse_indices` selects for it.

    The absorbed form of multi-head latent attention: one key/value head of a latent part (size D)
    and a rope part (size Dr) serves all N1 query heads. Differentiable with respect to query, key,
    value, query_rope and key_rope, through out and through softmax_sum, by which
    :func:`log_sum_exp` is. **To train on an NPU, every row has to select min(K, visible) keys or
    blocks**, as :func:`lightning_indexer` does: the kernel of the gradient reads that many slots,
    and -1 in one of them makes it read outside its tensors. To attend to fewer keys, choose a
    smaller K.

    Args:
        query: (B, S1, N1, D), or (T1, N1, D) in layout TND; float16 or bfloat16 (float32 and
            float64 as well when the device limits are off).
        key: (B, S2, 1, D) or (T2, 1, D), or with layout_kv "PA_BSND" a cache, (num_blocks,
            block_size, 1, D); query's dtype.
        value: as key. Under device limits it has key's numbers, as in absorbed MLA: the NPU reads
            key in its place.
        sparse_indices: (B, S1, 1, K) or (T1, 1, K), also without the axis of heads. Keys, or
            blocks of `sparse_block_size` keys, counted from the first key of the sequence. The
            first min(K, visible blocks) slots are read, up to the first -1.
        scale_value: factor of the scores: 1 / sqrt(head size before absorption), times the square
            of YaRN's mscale if the checkpoint uses it.
        actual_seq_lengths_query, actual_seq_lengths_key: as in :func:`lightning_indexer`.
        query_rope: (B, S1, N1, Dr) or (T1, N1, Dr); query's dtype. Pass both ropes or neither
            (NoPE).
        key_rope: (B, S2, 1, Dr) or (T2, 1, Dr), or a cache like key's; query's dtype.
        sparse_block_size: keys per index; with "PA_BSND" a divisor of block_size.
        layout: "BSND" or "TND", of the queries.
        sparse_mode, pre_tokens, next_tokens: as in :func:`lightning_indexer`.
        deterministic: request a deterministic backward, as torch.use_deterministic_algorithms does.
            The CPU is always deterministic; an NPU with CANN 8.5 cannot be.
        layout_kv, block_table: as layout_key and block_table of :func:`lightning_indexer`; only
            without gradients.
        return_softmax_lse: whether to return the statistics, which a backward needs, and by which
            :func:`attention_update` merges results over parts of the keys. None returns them unless
            keys are paged: an NPU then has to copy the selected keys.

    Returns:
        out, with query's shape and dtype; softmax_max and softmax_sum, float32 (float64 for float64
        inputs), (B, 1, S1, N1) or (1, T1, N1): the maximum of the scaled scores of a row and the
        sum of exp(score - maximum). Rows without keys are zero in all three. Statistics that are
        not returned are empty, (0,).

    Raises:
        As :func:`lightning_indexer`, and ValueError for an index out of range; NotImplementedError
            for a gradient with paged keys or without statistics.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def bfloat16(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16)
        >>> query, query_rope = 0 * bfloat16(1, 8, 32, 512), 0 * bfloat16(1, 8, 32, 64)
        >>> latent, key_rope = bfloat16(1, 8, 1, 512), bfloat16(1, 8, 1, 64)
        >>> indices = torch.full((1, 8, 1, 2048), -1, dtype=torch.int32)
        >>> indices[..., :8] = torch.arange(8, dtype=torch.int32)
        >>> out, softmax_max, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, scale_value=192**-0.5,
        ...     query_rope=query_rope, key_rope=key_rope)
        >>> softmax_sum[0, 0, :, 0].tolist()  # of scores of 0: how many keys each token sees
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]

    Source: docs/operators/sparse_flash_attention.md; CANN's document of
    aclnnSparseFlashAttention.
    """
    if return_softmax_lse is None:
        return_softmax_lse = layout_kv != "PA_BSND"
    return _OPERATOR.call(
        query, key, value, sparse_indices, scale_value, actual_seq_lengths_query,
        actual_seq_lengths_key, query_rope, key_rope, sparse_block_size, layout, sparse_mode,
        pre_tokens, next_tokens, deterministic, layout_kv, block_table, return_softmax_lse,
    )  # fmt: skip
