"""Attention over selected keys."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._operators import operators

# pre_tokens and next_tokens are ignored by the sparse modes 0 and 3; these are the values that the
# device's forward and gradient functions want to see.
_ALL_TOKENS = 9223372036854775807
_ALL_TOKENS_GRAD = 2147483647


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query token over the keys that `sparse_indices` selects for it.

    The absorbed form of multi-head latent attention: one key/value head of a latent part (size D)
    and a rope part (size Dr) serves all N1 query heads. With `pos` the selected keys of a row::

        s   = scale_value * (query @ key[pos]^T + query_rope @ key_rope[pos]^T)
        out = softmax(s) @ value[pos]

    Differentiable with respect to query, key, value, query_rope and key_rope.

    Args:
        query: (B, S1, N1, D), or (T1, N1, D) in layout TND; float16 or bfloat16 (float32 and
            float64 as well when the device limits are off).
        key: (B, S2, 1, D) or (T2, 1, D); query's dtype.
        value: as key. Pass the same tensor twice for absorbed MLA; the NPU requires it.
        sparse_indices: (B, S1, 1, K) or (T1, 1, K); int32. Indices of keys (of blocks of
            `sparse_block_size` keys), relative to the first key of the sequence. The first -1 ends
            a row; an index that occurs twice counts twice. The first min(K, visible blocks) are
            read.
        scale_value: factor of the scores, usually 1 / sqrt(D of the unabsorbed head + Dr).
        actual_seq_lengths_query: (B,); int32. BSND: valid tokens per batch, optional, forward
            only. TND: required, inclusive prefix sums (lengths 3, 2, 4 are given as 3, 5, 9).
        actual_seq_lengths_key: as actual_seq_lengths_query, for key.
        query_rope: (B, S1, N1, Dr) or (T1, N1, Dr); query's dtype. Together with key_rope.
        key_rope: (B, S2, 1, Dr) or (T2, 1, Dr); query's dtype.
        sparse_block_size: keys per index, in tokens.
        layout: "BSND" or "TND".
        sparse_mode: 0, every key of the sequence is visible; 3, causal, the last query token sees
            the last key.
        pre_tokens: ignored by modes 0 and 3.
        next_tokens: ignored by modes 0 and 3.
        deterministic: asks the backward for it, as torch.use_deterministic_algorithms does. The
            CPU is always deterministic.

    Returns:
        out of query's shape and dtype; softmax_max and softmax_sum, float32 (float64 for float64
        inputs), (B, 1, S1, N1) or (1, T1, N1): the maximum of the scaled scores of a row and the
        sum of exp(score - maximum). Rows without keys are zero in all three.

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a shape, length, index, layout, mode or device limit is violated.
        NotImplementedError: the product in force has no such operator; a second derivative.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.randn(1, 8, 2, 512, dtype=torch.bfloat16)
        >>> latent = torch.randn(1, 8, 1, 512, dtype=torch.bfloat16)
        >>> indices = torch.arange(1024, dtype=torch.int32).expand(1, 8, 1, 1024).clone()
        >>> indices[indices >= 8] = -1
        >>> out, softmax_max, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        ...     query, latent, latent, indices, scale_value=512**-0.5)
        >>> out.shape
        torch.Size([1, 8, 2, 512])

    Source: SparseFlashAttention, the forward of the seed SparseFlashAttentionGrad
    (001_9b762d6b62fa1de6), section "功能说明".
    """
    return operators().sparse_flash_attention(
        query,
        key,
        value,
        sparse_indices,
        scale_value,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        query_rope,
        key_rope,
        sparse_block_size,
        layout,
        sparse_mode,
        pre_tokens,
        next_tokens,
        deterministic,
    )


def sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    *,
    scale_value: float,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _ALL_TOKENS_GRAD,
    next_tokens: int = _ALL_TOKENS_GRAD,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of :func:`sparse_flash_attention`; autograd calls this by itself.

    With P the attention weights of a row, rebuilt from the statistics::

        dS = P * (d_out @ value[pos]^T - rowsum(d_out * out))
        d_value[pos] += P^T @ d_out
        d_query = scale_value * dS @ key[pos];   d_key[pos] += scale_value * dS^T @ query

    and the same for the ropes. P and dS are rounded to query's dtype before the products, which
    are accumulated in float32 (float64 for float64 inputs).

    Args:
        query, key, value, sparse_indices, query_rope, key_rope: as in the forward. On the NPU a
            row must not hold -1 among the slots that are read; and with sparse_block_size > 1 in
            mode 3 the block of the diagonal must be in the last slot read.
        d_out: gradient of out; out's shape and dtype.
        out, softmax_max, softmax_sum: what the forward returned.
        actual_seq_lengths_query, actual_seq_lengths_key: TND only, as in the forward.
        scale_value, sparse_block_size, layout, sparse_mode, deterministic: as in the forward.
        pre_tokens, next_tokens: ignored by modes 0 and 3.

    Returns:
        d_query, d_key, d_value, d_query_rope, d_key_rope, each of the shape and dtype of what it
        belongs to; without ropes the last two are empty, (0,). d_key and d_value are separate also
        when key and value are one tensor: the gradient of that tensor is their sum.

    Raises:
        As :func:`sparse_flash_attention`; ValueError also for lengths in layout BSND.

    Source: seed SparseFlashAttentionGrad (001_9b762d6b62fa1de6).
    """
    return operators().sparse_flash_attention_grad(
        query,
        key,
        value,
        sparse_indices,
        d_out,
        out,
        softmax_max,
        softmax_sum,
        scale_value,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        query_rope,
        key_rope,
        sparse_block_size,
        layout,
        sparse_mode,
        pre_tokens,
        next_tokens,
        deterministic,
    )
