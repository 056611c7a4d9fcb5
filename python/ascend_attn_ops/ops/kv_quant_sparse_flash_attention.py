"""Attention over selected keys of a cache in int8."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE, Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("kv_quant_sparse_flash_attention")


def kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    sparse_block_size: int = 1,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS_SPARSE,
    next_tokens: int = ALL_TOKENS_SPARSE,
    layout_kv: str | None = None,
    block_table: Tensor | None = None,
    key_quant_mode: int = 2,
    value_quant_mode: int = 2,
    tile_size: int = 128,
    rope_head_dim: int = 64,
) -> Tensor:
    """:func:`sparse_flash_attention` over a latent cache in int8, for inference.

    A row of the cache has 656 bytes, as :func:`quantize_latent` makes them: 512 int8 numbers, the
    64 elements of the rope in query's dtype, and four float32 scales, one for each tile of 128
    numbers. Only the selected rows are dequantised.

    Args:
        query: (B, S1, N1, 576), or (T1, N1, 576) in layout TND: the latent part, then the rope;
            float16 or bfloat16. With the device limits off, also float32 and float64, whose ropes
            take as many bytes in a row, and other sizes.
        key: the rows, int8: (B, S2, 1, 656) or (T2, 1, 656), or with layout_kv "PA_BSND" a cache,
            (num_blocks, block_size, 1, 656).
        value: any tensor, which is not read: the latent part of key is its own value.
        sparse_indices, scale_value, actual_seq_lengths_query, actual_seq_lengths_key, layout,
            sparse_mode, pre_tokens, next_tokens, layout_kv, block_table: as in
            :func:`sparse_flash_attention`.
        sparse_block_size: keys per index; devices take 1.
        key_quant_mode, value_quant_mode: 2, a scale for each tile.
        tile_size: numbers per scale. The last tile of a row may have fewer.
        rope_head_dim: how many of query's last elements are the rope.

    Returns:
        out, (B, S1, N1, 512) or (T1, N1, 512), with query's dtype. Rows without keys are zero.

    Raises:
        As :func:`sparse_flash_attention`; also NotImplementedError for an input that requires grad.

    Example:
        >>> import torch, ascend_attn_ops
        >>> latent = torch.arange(4.0).view(4, 1, 1).expand(4, 1, 512)
        >>> cache = torch.zeros(1, 16, 1, 656, dtype=torch.int8)
        >>> cache[0, :4] = ascend_attn_ops.quantize_latent(latent, torch.zeros(4, 1, 64).bfloat16())
        >>> out = ascend_attn_ops.kv_quant_sparse_flash_attention(
        ...     torch.zeros(1, 8, 576, dtype=torch.bfloat16), cache, cache,
        ...     torch.tensor([[[1, 3]]], dtype=torch.int32), scale_value=192**-0.5, layout="TND",
        ...     layout_kv="PA_BSND", block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     actual_seq_lengths_query=[1], actual_seq_lengths_key=[4])
        >>> out[0, 0, :2].tolist()  # the mean of 1 and 3
        [2.0, 2.0]

    Source: docs/operators/kv_quant_sparse_flash_attention.md; CANN has no document of
    aclnnKvQuantSparseFlashAttention.
    """
    out: Tensor = _OPERATOR.call(
        query, key, value, sparse_indices, scale_value, actual_seq_lengths_query,
        actual_seq_lengths_key, sparse_block_size, layout, sparse_mode, pre_tokens, next_tokens,
        layout_kv, block_table, key_quant_mode, value_quant_mode, tile_size, rope_head_dim,
    )  # fmt: skip
    return out
