"""Attention for serving: contiguous or paged keys, ropes, sinks and the log-sum-exp."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Never

from ascend_attn_ops._core.operators import ALL_TOKENS, Operator, refuse_unknown
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("fused_infer_attention_score")


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    num_key_value_heads: int = 0,
    atten_mask: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    block_table: Tensor | None = None,
    block_size: int = 0,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sink: Tensor | None = None,
    scale_value: float | None = None,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    key_antiquant_scale: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    dequant_scale_query: Tensor | None = None,
    query_quant_mode: int = 0,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Attention for serving, without gradients: prefill, chunked prefill and decoding.

    Rows that keep no key are zero; their lse is -inf or the sink, so that :func:`attention_update`
    merges them with other parts. For gradients, use :func:`flash_attention_score`.

    Args:
        query: (B, Sq, N*D) in layout BSH, (B, Sq, N, D) in BSND, (B, N, Sq, D) in BNSD, (T, N, D)
            in TND, (N, T, D) in NTD; float16 or bfloat16 (float32 and float64 as well when the
            device limits are off), or int8 with dequant_scale_query.
        key: contiguous keys as query, with Skv tokens and Nk heads: query head n reads key head
            n // (N / Nk). With block_table the pages of a cache: (num_blocks, block_size, Nk*D),
            which flatten(2) makes of (num_blocks, block_size, Nk, D), (num_blocks, Nk, block_size,
            D) or, in fractals (NZ), (num_blocks, Nk, D/16, block_size, 16).
        value: as key; its head size Dv may differ.
        num_heads: N, the number of query heads. BSH needs it.
        num_key_value_heads: Nk, a divisor of N; 0 for N.
        layout: that of query, contiguous key and out: "BSH", "BSND", "BNSD" or "TND". Pairs such as
            "BNSD_BSND" and "TND_NTD" name another layout of out.
        atten_mask: bool, int8 or uint8, **True (1) masks a key out**. sparse_mode 0 and 1: (1 or B,
            Sq, Skv), (1 or B, 1, Sq, Skv), (Sq, Skv), or where Sq is 1 (B, Skv); further rows and
            columns are ignored. TND and NTD take no full mask. Modes 2 to 4 need no mask.
        actual_seq_lengths_query: in TND and NTD the cumulative sequence lengths, which end with T.
            In other layouts how many of the Sq queries are valid, for each batch, or one number for
            all of them; None or empty: all Sq. A tensor or a list; a tensor on the NPU makes the
            call wait for it.
        actual_seq_lengths_key: the same for contiguous keys. With block_table, the number of keys
            of each sequence in all layouts, and required.
        block_table: (B, M) integers, the blocks of each sequence in order.
        block_size: that of key, a multiple of 16, or 0; ignored without block_table.
        query_rope: further channels of query, (.., Dr) instead of (.., D), as multi-head latent
            attention has them.
        key_rope: as query_rope, of key, in the same pages.
        sink: (N,), of any floating dtype: the score of one more key per head, without a value.
        scale_value: factor of the scores; None for 1 / sqrt(D + Dr). Absorbed latent attention
            needs the model's own.
        pre_tokens: sparse_mode 0 with a mask, and 4: how many keys before the diagonal are kept.
        next_tokens: how many after it.
        sparse_mode: 0 to 4, as in :func:`flash_attention_score`, for the valid lengths. 0 without a
            mask keeps all keys.
        inner_precise: 0 to 3, how the device computes; the CPU ignores it.
        return_softmax_lse: whether softmax_lse is computed.
        key_antiquant_scale: scales of int8 keys, which are in fractals (num_blocks, Nk, D/32,
            block_size, 32). Mode 0: in query's dtype, (Nk*D,) in layout BSH, (Nk, 1, D) in BNSD,
            (Nk, D) in others. Mode 1: float32 (float64 for float64 inputs), (B, S), one for key j
            of each sequence. Beside an int8 query: float32, (1,).
        value_antiquant_scale: the same of value, with Dv; both or none.
        key_antiquant_mode: 0, a scale for each channel, or 1, for each token.
        value_antiquant_mode: as key_antiquant_mode.
        dequant_scale_query: scales of an int8 query: float32, query's shape without D, (B, Sq, N)
            in layout BSH. Requires bfloat16 ropes, which the scales multiply as well.
        query_quant_mode: 3 beside dequant_scale_query.

    Returns:
        out, in query's dtype and the layout of the output with Dv for D: NBSD is (N, B, Sq, Dv),
        NTD is (N, T, Dv); and softmax_lse, natural logarithms in float32 (float64 for float64
        inputs): (T, N, 1) in TND, NTD and their pairs, (B, N, Sq, 1) in all other layouts, (0,) if
        not asked for.

    Raises:
        TypeError: a dtype is not supported or disagrees. Other quantised tensors are left to
            torch_npu.
        ValueError: a shape, length, layout, mode, block number, mask content or device limit is
            violated.
        NotImplementedError: the product in force has no such operator; an input requires grad.

    Example:
        >>> import torch, ascend_attn_ops
        >>> cache = torch.randn(8, 16, 2 * 64, dtype=torch.bfloat16)    # 8 pages of 16 keys, Nk 2
        >>> query = torch.zeros(3, 4, 64, dtype=torch.bfloat16)         # 3 tokens of 2 sequences
        >>> table = torch.tensor([[5, 0], [2, 7]], dtype=torch.int32)
        >>> out, lse = ascend_attn_ops.fused_infer_attention_score(
        ...     query, cache, cache, num_heads=4, num_key_value_heads=2, layout="TND",
        ...     block_table=table, actual_seq_lengths_query=[1, 3], actual_seq_lengths_key=[20, 9],
        ...     sparse_mode=3, return_softmax_lse=True)
        >>> lse[:, 0, 0].exp().round().tolist()  # of scores of 0: how many keys each token sees
        [20.0, 8.0, 9.0]

    Source: docs/operators/fused_infer_attention_score.md; CANN's documents of
    aclnnFusedInferAttentionScoreV4 and V5.
    """
    if unknown:
        refuse_unknown("fused_infer_attention_score", unknown)
    outputs: tuple[Tensor, Tensor] = _OPERATOR.call(
        query, key, value, num_heads, num_key_value_heads, layout, atten_mask,
        actual_seq_lengths_query, actual_seq_lengths_key, block_table, block_size, query_rope,
        key_rope, sink, scale_value, pre_tokens, next_tokens, sparse_mode, inner_precise,
        return_softmax_lse, key_antiquant_scale, value_antiquant_scale, key_antiquant_mode,
        value_antiquant_mode, dequant_scale_query, query_quant_mode,
    )  # fmt: skip
    return outputs
