"""The attention of DeepSeek-V4 on one part: a window of tokens, and compressed keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import ascend_attn_ops as ops
from ascend_attn_ops._arguments import INT64_MAX
from ascend_attn_ops.distributed._communication import all_reduce, sum_dtype
from ascend_attn_ops.distributed._layout import Rows, Tensors
from ascend_attn_ops.distributed._operations import check_range, empty_slots, residual
from ascend_attn_ops.distributed._parts import DifferentiableOperation, Gradients, Source
from ascend_attn_ops.distributed.shards import SequenceShards
from ascend_attn_ops.indexer_training import indexer_loss


@dataclass(frozen=True)
class CompressedAttention(DifferentiableOperation):
    """sparse_flash_mla; queries: query, its indices and the sink; keys: ori_kv and cmp_kv."""

    name: ClassVar[str] = "sparse_flash_mla"
    differentiable: ClassVar[int] = 0
    shared: ClassVar[int] = 1

    scale_value: float
    cmp_ratio: int
    ori_mask_mode: int
    cmp_mask_mode: int
    ori_win_left: int
    ori_win_right: int
    deterministic: bool

    @property
    def _causal(self) -> bool:
        return self.cmp_mask_mode == 3

    def sources(self, shards: SequenceShards, keys: Tensors) -> list[Source]:
        tokens: Source = shards
        if self.ori_mask_mode == 4 and min(self.ori_win_left, self.ori_win_right) >= 0:
            window = ("window", self.ori_win_left, self.ori_win_right)
            tokens = shards._ranges_around(window, self._window)
        compressed = shards if keys[1] is None else shards.compressed(self.cmp_ratio)
        return [tokens, *[compressed] * (len(keys) - 1)]

    def _window(self, part: Rows) -> tuple[int, int]:
        """The tokens that the queries of a part see; modes 0 and 3 have no window."""
        left, right = {3: (-1, 0), 4: (self.ori_win_left, self.ori_win_right)}.get(
            self.ori_mask_mode, (-1, -1)
        )
        begin = 0 if left < 0 else max(part.begin - left, 0)
        return begin, part.length if right < 0 else min(part.end + right, part.length)

    def ranges(self, part: Rows, keys: Tensors) -> list[tuple[int, int]]:
        complete = 0 if keys[1] is None else self._tokens(part) // self.cmp_ratio
        return [self._window(part), *[(0, complete)] * (len(keys) - 1)]

    def _tokens(self, part: Rows) -> int:
        """The tokens whose complete compressed keys a part needs."""
        return part.end if self._causal else part.length

    def check_values(self, parts: Sequence[Rows], queries: Tensors) -> None:
        if queries[1] is None:
            return
        for part in parts:
            read = queries[1][part.here]
            if self._causal:
                read = self._empty_unread(part, read.unsqueeze(0))[0]
            last = self._tokens(part) // self.cmp_ratio
            check_range(self, "cmp_sparse_indices", part, read, last)

    def _indices(self, part: Rows, indices: Any) -> Any:
        if indices is None or not self._causal:
            return indices
        return self._empty_unread(part, indices)

    def _empty_unread(self, part: Rows, indices: Tensor) -> Tensor:
        """Empties the slots that are not read: they may name keys that the part lacks."""
        tokens = torch.arange(part.begin + 1, part.end + 1, device=indices.device)
        return empty_slots(indices, tokens // self.cmp_ratio)

    def _options(self, part: Rows, queries: Tensors, keys: Tensors) -> dict[str, Any]:
        options: dict[str, Any] = {
            "scale_value": self.scale_value,
            "sink": queries[-self.shared],
            "cmp_ratio": self.cmp_ratio,
            "ori_mask_mode": self.ori_mask_mode,
            "cmp_mask_mode": self.cmp_mask_mode,
            "ori_win_left": self.ori_win_left,
            "ori_win_right": self.ori_win_right,
            "deterministic": self.deterministic,
        }
        # The operator aligns the last query with the last key, which may be a later token.
        shift = self._window(part)[1] - part.end
        if shift and self.ori_mask_mode == 4:
            if self.ori_win_left >= 0:
                options["ori_win_left"] = min(self.ori_win_left + shift, INT64_MAX)
            if self.ori_win_right >= 0:
                options["ori_win_right"] = self.ori_win_right - shift
        if keys[1] is not None:
            options["cmp_residual_kv"] = residual(self._tokens(part), self.cmp_ratio, queries[0])
        return options

    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        query, indices = queries[:2]
        out, softmax_lse = ops.sparse_flash_mla(
            query, keys[0], keys[1], self._indices(part, indices),
            **self._options(part, queries, keys),
        )  # fmt: skip
        return out[0], softmax_lse[0, 0]

    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        d_query, d_sink, *d_keys = self._gradients(part, queries, keys, outputs, d)[:4]
        return (d_query, None, d_sink), tuple(d_keys)

    def _gradients(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
        """The gradients of query, sink, ori_kv and cmp_kv, and the target of an indexer."""
        (query, indices), (ori_kv, cmp_kv) = queries[:2], keys[:2]
        out, softmax_lse = outputs
        d_query, d_ori_kv, d_cmp_kv, d_sink, target = ops.sparse_flash_mla_grad(
            query, ori_kv, cmp_kv, self._indices(part, indices), d.unsqueeze(0), out.unsqueeze(0),
            softmax_lse[None, None], **self._options(part, queries, keys),
        )  # fmt: skip
        of_sink = None if queries[-self.shared] is None else d_sink
        return d_query, of_sink, d_ori_kv, None if cmp_kv is None else d_cmp_kv, target


class LossReport:
    """Sums the loss of the parts of all ranks, and tells it to `on_loss`."""

    def __init__(self, on_loss: Callable[[Tensor], None]) -> None:
        self._on_loss = on_loss
        self._losses: list[Tensor] = []

    def add(self, target: Tensor, softmax: Tensor) -> None:
        self._losses.append(indexer_loss(target, softmax.view(target.shape)).reshape(1))

    def finish(self, shards: SequenceShards, query: Tensor) -> None:
        losses, self._losses = self._losses, []
        total = sum(losses, start=query.new_zeros(1, dtype=sum_dtype(query)))
        self._on_loss(all_reduce(shards, total))


@dataclass(frozen=True)
class AttentionWithLoss(CompressedAttention):
    """sparse_flash_mla_with_indexer_loss.

    Queries: query, indices, query_index, weights, sink, and the loss's factor if it is a tensor;
    keys: ori_kv, cmp_kv, key_index.
    """

    name: ClassVar[str] = "sparse_flash_mla_with_indexer_loss"
    shared: ClassVar[int] = 2
    for_backward: ClassVar[int] = 1

    # Whether a gradient of the indexer is required.
    trained: bool
    factor: Any  # a float; None for a tensor, which is one of the queries
    report: LossReport | None = None

    def never_cast(self) -> tuple[str, ...]:
        return "weights", "indexer_loss_weight"

    def dry_run(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        outputs = self.forward(part, queries, keys)
        # A rank without tokens has no keys for the backward when it makes its empty outputs.
        if self.trained and keys[2] is not None:
            self._learn(part, queries, keys, torch.empty_like(queries[1], dtype=outputs[1].dtype))
        return outputs

    def _learn(
        self, part: Rows, queries: Tensors, keys: Tensors, target: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of query_index, key_index and weights, and the softmax of the scores."""
        query, indices, query_index, weights = queries[:4]
        return ops.sparse_lightning_indexer_kl_loss_grad(
            query_index, keys[2], weights, self._indices(part, indices), target,
            cmp_residual_key=residual(self._tokens(part), self.cmp_ratio, query),
            layout="BSND", sparse_mode=self.cmp_mask_mode, cmp_ratio=self.cmp_ratio,
            deterministic=self.deterministic,
        )  # fmt: skip

    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        d_query, d_sink, *d_keys, target = self._gradients(part, queries, keys, outputs, d)
        d_indexer: list[Tensor | None] = [None] * 3
        if self.trained:
            *gradients, softmax = self._learn(part, queries, keys, target)
            factor = queries[-1]
            d_indexer = [
                x * (self.factor if factor is None else factor.to(x.dtype)) for x in gradients
            ]
            if self.report is not None:
                self.report.add(target, softmax)
        d_query_index, d_key_index, d_weights = d_indexer
        d_queries = (d_query, None, d_query_index, d_weights, d_sink, None)
        return d_queries, (*d_keys, d_key_index)

    def finish_backward(self, shards: SequenceShards, queries: Tensors) -> None:
        if self.trained and self.report is not None:
            self.report.finish(shards, queries[0])
