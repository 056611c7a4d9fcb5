"""Attention of DeepSeek-V4: a window, compressed keys and a sink in one softmax."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("sparse_flash_mla")


def sparse_flash_mla(
    query: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    *,
    scale_value: float,
    sink: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_ori_kv: Lengths = None,
    actual_seq_lengths_cmp_kv: Lengths = None,
    cmp_residual_kv: Tensor | None = None,
    cmp_ratio: int = 1,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 127,
    ori_win_right: int = 0,
    layout: str = "BSND",
    deterministic: bool = False,
    layout_kv: str | None = None,
    ori_block_table: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    return_softmax_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to a window, to compressed keys and to a sink, as in DeepSeek-V4.

    One key head serves all N1 query heads, and a key is its own value. Without `cmp_kv` a query
    sees its window alone (SWA); with `cmp_kv` also every compressed key that is complete (HCA);
    with `cmp_sparse_indices` those compressed keys that an indexer selects (CSA).

    out and softmax_lse are differentiable with respect to query, ori_kv, cmp_kv and sink, but not
    twice. **On an NPU, give every row exactly min(K, n) indices, valid ones first**, where n is the
    number of compressed keys that it sees, and let the last cumulative length in layout TND be T1
    if you train: the kernels read memory that is not theirs otherwise. A2 and A3 cannot compute the
    gradient deterministically.

    Args:
        query: (B, S1, N1, D), or (T1, N1, D) in layout TND; float16 or bfloat16 (float32 and
            float64 as well when the device limits are off).
        ori_kv: the original keys, one per token: (B, S2, 1, D) or (T2, 1, D), or with layout_kv
            "PA_BSND" a cache, (num_blocks, block_size, 1, D); query's dtype.
        cmp_kv: the compressed keys, one for `cmp_ratio` tokens: (B, S3, 1, D) or (T3, 1, D), or a
            cache; query's dtype.
        cmp_sparse_indices: (B, S1, 1, K) or (T1, 1, K), also without the axis of heads.
            Compressed keys, counted from the first of the sequence. The first min(K, n) are read,
            up to the first -1.
        scale_value: factor of the scores: D**-0.5 in DeepSeek-V4.
        sink: (N1,), float32 (float64 for float64 inputs): a logit per head that has no value. None:
            an ordinary softmax, which the NPU does not have.
        actual_seq_lengths_query: as in :func:`lightning_indexer`.
        actual_seq_lengths_ori_kv, actual_seq_lengths_cmp_kv: as actual_seq_lengths_key there.
        cmp_residual_kv: (B,), each in [0, cmp_ratio): the tokens of each sequence that no
            compressed key stands for yet. None: the original keys are all tokens of the sequence.
            Pass it if they are not, as in decoding with a cache of the window alone.
        cmp_ratio: tokens per compressed key; ignored without cmp_kv.
        ori_mask_mode: the original keys that a query sees. Queries are aligned with the end of the
            keys. 4: a window of `ori_win_left` earlier and `ori_win_right` later keys and its own;
            3: all keys up to its own; 0: all keys.
        cmp_mask_mode: the compressed keys that a query sees. 3: those whose tokens end at its own
            or before; 0: all.
        ori_win_left, ori_win_right: earlier and later keys in the window; -1 for all.
        layout: "BSND" or "TND", of the queries.
        deterministic: as in :func:`sparse_flash_attention`.
        layout_kv: as layout_key in :func:`lightning_indexer`. "PA_BSND" is for inference only.
        ori_block_table, cmp_block_table: (B, M), int32 or int64; with "PA_BSND" only.
        return_softmax_lse: whether to return softmax_lse.

    Returns:
        out, with query's shape and dtype; softmax_lse, float32 (float64 for float64 inputs),
        (B, 1, S1, N1) or (1, T1, N1), or empty, (0,). Both are 0 for rows without keys and for
        tokens behind the last sequence.

    Raises:
        As :func:`sparse_flash_attention`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> def bfloat16(*shape):
        ...     return torch.randn(*shape, dtype=torch.bfloat16)
        >>> query, ori_kv = 0 * bfloat16(1, 16, 64, 512), bfloat16(1, 16, 1, 512)
        >>> cmp_kv = bfloat16(1, 4, 1, 512)
        >>> indices = torch.full((1, 16, 1, 512), -1, dtype=torch.int32)
        >>> for token in range(16):
        ...     complete = (token + 1) // 4
        ...     indices[0, token, 0, :complete] = torch.arange(complete, dtype=torch.int32)
        >>> out, softmax_lse = ascend_attn_ops.sparse_flash_mla(
        ...     query, ori_kv, cmp_kv, indices, scale_value=512**-0.5, sink=torch.zeros(64),
        ...     cmp_ratio=4)
        >>> round(softmax_lse[0, 0, 15, 0].exp().item())  # 16 tokens, 4 compressed keys, a sink
        21

    Source: docs/operators/sparse_flash_mla.md; CANN's document of aclnnSparseFlashMla.
    """
    return _OPERATOR.call(
        query, ori_kv, cmp_kv, cmp_sparse_indices, scale_value, sink, actual_seq_lengths_query,
        actual_seq_lengths_ori_kv, actual_seq_lengths_cmp_kv, cmp_residual_kv, cmp_ratio,
        ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right, layout, deterministic, layout_kv,
        ori_block_table, cmp_block_table, return_softmax_lse,
    )  # fmt: skip
