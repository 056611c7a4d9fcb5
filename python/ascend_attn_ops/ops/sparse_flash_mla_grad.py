"""The gradients of DeepSeek-V4's attention."""

from __future__ import annotations

from torch import Tensor

from ascend_attn_ops._core.operators import Operator
from ascend_attn_ops._core.packing import Lengths

_OPERATOR = Operator("sparse_flash_mla_grad")


def sparse_flash_mla_grad(
    query: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None,
    cmp_sparse_indices: Tensor | None,
    d_out: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
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
    d_softmax_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of :func:`sparse_flash_mla`, which autograd calls by itself.

    It also returns the probabilities of the selected keys, the mean over the heads, which are the
    target that an indexer learns from. The keywords are the forward's, with the same values. **On
    an NPU, the last cumulative length in layout TND must be T1.**

    Args:
        query, ori_kv, cmp_kv, cmp_sparse_indices: as in the forward.
        d_out: gradient of out; out's shape and dtype. None, beside d_softmax_lse: zeros.
        out, softmax_lse: results of the forward.
        d_softmax_lse: gradient of softmax_lse, in its shape. The NPU takes it for bfloat16 alone.

    Returns:
        d_query, d_ori_kv, d_cmp_kv and d_sink, each with the shape and dtype of its tensor;
        cmp_softmax_l1_norm, with the shape of cmp_sparse_indices, float32 (float64 for float64
        inputs): 0 in slots that no row reads. The sum of a row is the share of the attention that
        its selected keys have, which is below 1. A result whose argument is None is empty, (0,).

    Raises:
        As :func:`sparse_flash_mla`.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query = torch.zeros(1, 200, 64, 512, dtype=torch.bfloat16)
        >>> ori_kv = torch.randn(1, 200, 1, 512, dtype=torch.bfloat16)
        >>> cmp_kv = torch.randn(1, 1, 1, 512, dtype=torch.bfloat16)
        >>> options = {"scale_value": 512**-0.5, "sink": torch.zeros(64), "cmp_ratio": 128}
        >>> out, softmax_lse = ascend_attn_ops.sparse_flash_mla(query, ori_kv, cmp_kv, **options)
        >>> d_query, d_ori_kv, *_ = ascend_attn_ops.sparse_flash_mla_grad(
        ...     query, ori_kv, cmp_kv, None, torch.ones_like(out), out, softmax_lse, **options)
        >>> round(d_ori_kv[0, 199, 0, 0].item(), 2)  # 64 heads, 128 + 1 keys and a sink
        0.49

    Source: docs/operators/sparse_flash_mla.md; CANN's document of aclnnSparseFlashMlaGrad.
    """
    return _OPERATOR.call(
        query, ori_kv, cmp_kv, cmp_sparse_indices, d_out, out, softmax_lse, scale_value, sink,
        actual_seq_lengths_query, actual_seq_lengths_ori_kv, actual_seq_lengths_cmp_kv,
        cmp_residual_kv, cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right,
        layout, deterministic, d_softmax_lse,
    )  # fmt: skip
