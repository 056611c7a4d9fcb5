"""flash_attention_score on one part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

import ascend_attn_ops as ops
from ascend_attn_ops._dense_attention import default_mask
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops._statistics import LANES
from ascend_attn_ops.distributed._collectives import sum_dtype
from ascend_attn_ops.distributed._parts import DifferentiableOperation, Gradients, Rows, Tensors


@dataclass(frozen=True)
class DenseAttention(DifferentiableOperation):
    """flash_attention_score; queries: query; keys: key and value.

    Outputs: out (tokens, N, Dv), softmax_max and softmax_sum (tokens, N, 8).
    """

    name: ClassVar[str] = "flash_attention_score"
    differentiable: ClassVar[int] = 0

    num_heads: int
    scale_value: float
    # 0, all keys; 3, causal; 4, a band.
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    inner_precise: int

    def last_key(self, part: Rows) -> int:
        if self.sparse_mode == 0:
            return part.length
        if self.sparse_mode == 3:
            return part.end
        return min(max(part.end + self.next_tokens, 1), part.length)

    def _options(self, part: Rows, query: Tensor, keys: int) -> dict[str, Any]:
        """The keywords of a call with the first `keys` keys of the part's sequence."""
        options: dict[str, Any] = {
            "num_heads": self.num_heads,
            "layout": "BSND",
            "scale_value": self.scale_value,
            "sparse_mode": self.sparse_mode,
            "inner_precise": self.inner_precise,
            "atten_mask": default_mask(self.sparse_mode, query),
        }
        if self.sparse_mode == 4:
            # The operator counts from the diagonal to the bottom right, which query `begin` + i
            # meets at key i + keys - count.
            shift = keys - part.count - part.begin
            options |= {
                "pre_tokens": min(self.pre_tokens + shift, ALL_TOKENS),
                "next_tokens": min(self.next_tokens - shift, ALL_TOKENS),
            }
        return options

    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        (query,), (key, value) = queries, keys
        out, softmax_max, softmax_sum = ops.flash_attention_score(
            query, key, value, **self._options(part, query, key.shape[1])
        )
        return out[0], softmax_max[0].transpose(0, 1), softmax_sum[0].transpose(0, 1)

    def empty(self, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        query, value = queries[0], keys[1]
        statistics = query.new_empty((0, self.num_heads, LANES), dtype=sum_dtype(query))
        out = query.new_empty((0, self.num_heads, value.shape[-1]))
        return out, statistics, statistics.clone()

    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        (query,), (key, value) = queries, keys
        out, softmax_max, softmax_sum = outputs
        d_query, d_key, d_value = ops.flash_attention_score_grad(
            query, key, value, d.unsqueeze(0),
            softmax_max.transpose(0, 1).unsqueeze(0), softmax_sum.transpose(0, 1).unsqueeze(0),
            out.unsqueeze(0), **self._options(part, query, key.shape[1]),
        )  # fmt: skip
        return (d_query,), (d_key, d_value)
