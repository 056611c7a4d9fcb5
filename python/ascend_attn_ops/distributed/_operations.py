"""The operators on one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import ascend_attn_ops as ops
from ascend_attn_ops import _C
from ascend_attn_ops._arguments import INVALID
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops.distributed._communication import sum_dtype
from ascend_attn_ops.distributed._layout import Rows, Tensors
from ascend_attn_ops.distributed._parts import (
    DifferentiableOperation,
    Gradients,
    Operation,
    Source,
)
from ascend_attn_ops.distributed.shards import SequenceShards
from ascend_attn_ops.operators._loss_with_target import gradients_and_loss, prepared_target

# The operators' name of layout (B, S, N, D), in which every part runs.
_LAYOUT = "BSND"


def _read_slots(part: Rows, indices: Tensor, last: int, block_size: int = 1) -> Tensor:
    """Empties the slots behind those that are read: they may name keys that the part lacks."""
    if last == part.length or part.begin + 1 > (indices.shape[-1] - 1) * block_size:
        return indices
    visible = torch.arange(part.begin + 1, part.end + 1, device=indices.device)
    return empty_slots(indices, (visible + (block_size - 1)) // block_size)


def empty_slots(indices: Tensor, read: Tensor) -> Tensor:
    """Empties the slots of a batch of one behind the first read[i] of token i."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    per_token = read.view(-1, *[1] * (indices.dim() - 2))  # with an axis of heads or without
    return indices.masked_fill(slot >= per_token, -1)


def _check_indices(
    operation: Operation, parts: Sequence[Rows], indices: Tensor, block_size: int = 1
) -> None:
    """Raise what the operator would raise for these parts, among other keys than the device has."""
    for part in parts:
        last = operation.last_key(part)
        read = _read_slots(part, indices[part.here].unsqueeze(0), last, block_size)[0]
        check_range(operation, "sparse_indices", part, read, -(-last // block_size))


def check_range(operation: Operation, argument: str, part: Rows, indices: Tensor, end: int) -> None:
    """Raises unless the indices of a part are in [-1, end)."""
    if not indices.numel():
        return
    least, most = indices.aminmax()
    if least < -1 or most >= end:
        at = ((indices < -1) | (indices >= end)).nonzero()[0].tolist()
        got = indices[tuple(at)].item()
        at[0] += part.row
        raise ValueError(
            f"ascend::{operation.name}: {argument}: expected values in [-1, {end}), "
            f"got {got} at {tuple(at)} of the local tokens {INVALID}"
        )


def residual(tokens: int, ratio: int, like: Tensor) -> Tensor:
    """The tokens behind the last complete compressed key; filled on the device."""
    return like.new_full((1,), tokens % ratio, dtype=torch.int32)


class OverCompressedKeys(Operation):
    """An operation whose one kind of keys may stand for several tokens each."""

    cmp_ratio: int

    def sources(self, shards: SequenceShards, keys: Tensors) -> list[Source]:
        return [shards if self.cmp_ratio == 1 else shards.compressed(self.cmp_ratio)]

    def last_key(self, part: Rows) -> int:
        return super().last_key(part) // self.cmp_ratio

    def _residual(self, part: Rows, like: Tensor) -> Tensor | None:
        if self.cmp_ratio == 1:
            return None
        return residual(super().last_key(part), self.cmp_ratio, like)


@dataclass(frozen=True)
class Indexer(OverCompressedKeys, DifferentiableOperation):
    name: ClassVar[str] = "lightning_indexer"
    kinds: ClassVar[tuple[str, ...]] = ("key_index",)
    differentiable: ClassVar[int] = 1

    sparse_count: int
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    return_values: bool
    # Read by the backward.
    deterministic: bool
    cmp_ratio: int = 1

    def never_cast(self) -> tuple[str, ...]:
        return ("weights",) if self.cmp_ratio > 1 else ()

    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        query, weights = queries
        indices, values = ops.lightning_indexer(
            query, keys[0], weights,
            layout=_LAYOUT, sparse_count=self.sparse_count, sparse_mode=self.sparse_mode,
            pre_tokens=self.pre_tokens, next_tokens=self.next_tokens,
            return_values=self.return_values, cmp_ratio=self.cmp_ratio,
            cmp_residual_key=self._residual(part, query),
        )  # fmt: skip
        return indices[0], values[0] if self.return_values else values

    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        (query, weights), indices = queries, outputs[0]
        d_query, d_key, d_weights = ops.lightning_indexer_grad(
            query, keys[0], d.unsqueeze(0), indices.unsqueeze(0), weights,
            layout=_LAYOUT, sparse_mode=self.sparse_mode, deterministic=self.deterministic,
        )  # fmt: skip
        return (d_query, d_weights), (d_key,)


@dataclass(frozen=True)
class SparseAttention(DifferentiableOperation):
    name: ClassVar[str] = "sparse_flash_attention"
    kinds: ClassVar[tuple[str, ...]] = ("key", "value", "key_rope")
    differentiable: ClassVar[int] = 0

    scale_value: float
    sparse_block_size: int
    sparse_mode: int
    deterministic: bool
    # Whether value is key; it is None then, and key's gradient is that of both.
    tied: bool

    def _options(self, query_rope: Tensor | None, key_rope: Tensor | None) -> dict[str, Any]:
        return {
            "query_rope": query_rope,
            "key_rope": key_rope,
            "layout": _LAYOUT,
            "scale_value": self.scale_value,
            "sparse_block_size": self.sparse_block_size,
            "sparse_mode": self.sparse_mode,
            "deterministic": self.deterministic,
        }

    def _indices(self, part: Rows, indices: Tensor) -> Tensor:
        return _read_slots(part, indices, self.last_key(part), self.sparse_block_size)

    def check_values(self, parts: Sequence[Rows], queries: Tensors) -> None:
        _check_indices(self, parts, queries[1], self.sparse_block_size)

    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        query, indices, query_rope = queries
        key, value, key_rope = keys
        out, softmax_max, softmax_sum = ops.sparse_flash_attention(
            query, key, key if self.tied else value, self._indices(part, indices),
            **self._options(query_rope, key_rope),
        )  # fmt: skip
        return out[0], softmax_max[0, 0], softmax_sum[0, 0]

    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        query, indices, query_rope = queries
        key, value, key_rope = keys
        out, softmax_max, softmax_sum = outputs
        d_query, d_key, d_value, d_query_rope, d_key_rope = ops.sparse_flash_attention_grad(
            query, key, key if self.tied else value, self._indices(part, indices),
            d.unsqueeze(0), out.unsqueeze(0), softmax_max[None, None], softmax_sum[None, None],
            **self._options(query_rope, key_rope),
        )  # fmt: skip
        d_queries = (d_query, None, None if query_rope is None else d_query_rope)
        rope = None if key_rope is None else d_key_rope
        if self.tied:
            return d_queries, (d_key.to(sum_dtype(d_key)) + d_value, None, rope)
        return d_queries, (d_key, d_value, rope)


@dataclass(frozen=True)
class IndexerLoss(Operation):
    name: ClassVar[str] = "lightning_indexer_kl_loss"
    kinds: ClassVar[tuple[str, ...]] = ("key_index", "key", "key_rope")

    scale_value: float
    sparse_mode: int
    deterministic: bool

    def check_values(self, parts: Sequence[Rows], queries: Tensors) -> None:
        *_, indices, softmax_max, softmax_sum, _, token_weight = queries
        _check_indices(self, parts, indices)
        # The operator reads no statistics of tokens whose weight is 0.
        read = slice(None) if token_weight is None else token_weight != 0
        _C.check_statistics(self.name, softmax_max[read], softmax_sum[read])

    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The gradients of query_index, weights and key_index, and the loss of one part."""
        query_index, weights, query, indices, *attention, query_rope, token_weight = queries
        key_index, key, key_rope = keys
        d_query_index, d_key_index, d_weights, loss = ops.sparse_lightning_indexer_grad_kl_loss(
            query, key, query_index, key_index, weights,
            _read_slots(part, indices, self.last_key(part)),
            *(x.unsqueeze(0) for x in attention),
            query_rope=query_rope, key_rope=key_rope, scale_value=self.scale_value,
            layout=_LAYOUT, sparse_mode=self.sparse_mode, deterministic=self.deterministic,
            token_weight=token_weight,
        )  # fmt: skip
        return d_query_index, d_weights, d_key_index, loss


@dataclass(frozen=True)
class IndexerLossWithTarget(OverCompressedKeys):
    name: ClassVar[str] = "lightning_indexer_kl_loss"
    kinds: ClassVar[tuple[str, ...]] = ("key_index",)

    cmp_ratio: int
    sparse_mode: int
    deterministic: bool
    normalize_target: bool

    def never_cast(self) -> tuple[str, ...]:
        return "weights", "target"

    def _indices(self, part: Rows, indices: Tensor) -> Tensor:
        """Empties the slots that are not read: they may name keys that the part lacks."""
        if self.sparse_mode != 3:
            return indices
        tokens = torch.arange(part.begin + 1, part.end + 1, device=indices.device)
        return empty_slots(indices, tokens // self.cmp_ratio)

    def check_values(self, parts: Sequence[Rows], queries: Tensors) -> None:
        for part in parts:
            read = self._indices(part, queries[2][part.here].unsqueeze(0))[0]
            check_range(self, "sparse_indices", part, read, self.last_key(part))

    def forward(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        """The gradients of query_index, weights and key_index, and the loss of one part."""
        query_index, weights, indices, target, token_weight = queries
        indices = self._indices(part, indices)
        target, factors = prepared_target(target, indices, token_weight, self.normalize_target)
        options = {
            "cmp_residual_key": self._residual(part, query_index), "layout": _LAYOUT,
            "sparse_mode": self.sparse_mode, "cmp_ratio": self.cmp_ratio,
            "deterministic": self.deterministic,
        }  # fmt: skip
        d_query_index, d_key_index, d_weights, loss = gradients_and_loss(
            query_index, keys[0], weights, indices, target, factors, options
        )
        return d_query_index, d_weights, d_key_index, loss


@dataclass(frozen=True)
class DenseAttention(DifferentiableOperation):
    """flash_attention_score; queries: query, its rope and sink; keys: key, value and key's rope.

    Outputs: out (tokens, N, Dv), softmax_max and softmax_sum (tokens, N, 8).
    """

    name: ClassVar[str] = "flash_attention_score"
    differentiable: ClassVar[int] = 0
    shared: ClassVar[int] = 1

    num_heads: int
    scale_value: float
    # 0, all keys; 3, causal; 4, a band.
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    inner_precise: int
    # Among how many the heads are divided, which the operator has to accept.
    ranks: int = 1

    def on_meta(self, part: Rows, queries: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
        if self.ranks == 1:
            return super().on_meta(part, queries, keys)

        def share(tensors: Tensors) -> list[Any]:
            # The operator refuses what has no axis of heads.
            return [
                x if x is None or x.dim() < 3 else x[:, : x.shape[1] // self.ranks] for x in tensors
            ]

        one = replace(self, num_heads=self.num_heads // self.ranks, ranks=1)
        *of_tokens, sink = queries
        if sink is not None:
            sink = sink[: one.num_heads]
        return one.on_meta(part, [*share(of_tokens), sink], share(keys))

    def last_key(self, part: Rows) -> int:
        if self.sparse_mode != 4:
            return super().last_key(part)
        return min(max(part.end + self.next_tokens, 1), part.length)

    def _options(self, part: Rows, query: Tensor, keys: int) -> dict[str, Any]:
        """The keywords of a call with the first `keys` keys of the part's sequence."""
        options: dict[str, Any] = {
            "num_heads": self.num_heads,
            "layout": _LAYOUT,
            "scale_value": self.scale_value,
            "sparse_mode": self.sparse_mode,
            "inner_precise": self.inner_precise,
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
        (query, query_rope, sink), (key, value, key_rope) = queries, keys
        out, softmax_max, softmax_sum = ops.flash_attention_score(
            query, key, value, sink=sink, query_rope=query_rope, key_rope=key_rope,
            **self._options(part, query, key.shape[1]),
        )  # fmt: skip
        return out[0], softmax_max[0].transpose(0, 1), softmax_sum[0].transpose(0, 1)

    def backward(
        self, part: Rows, queries: Tensors, keys: Tensors, outputs: Tensors, d: Tensor
    ) -> tuple[Gradients, Gradients]:
        out, softmax_max, softmax_sum = outputs
        return dense_gradients(
            queries, keys, d.unsqueeze(0), softmax_max.transpose(0, 1).unsqueeze(0),
            softmax_sum.transpose(0, 1).unsqueeze(0), out.unsqueeze(0),
            self._options(part, queries[0], keys[0].shape[1]),
        )  # fmt: skip


def dense_gradients(
    queries: Tensors,
    keys: Tensors,
    dy: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    options: dict[str, Any],
) -> tuple[Gradients, Gradients]:
    """The gradients of query, its rope and sink, and of key, value and key's rope."""
    (query, query_rope, sink), (key, value, key_rope) = queries, keys
    tensors = (query, key, value, dy, softmax_max, softmax_sum, attention_in)
    extensions = {"sink": sink, "query_rope": query_rope, "key_rope": key_rope}
    if all(x is None for x in extensions.values()):
        d_query, d_key, d_value = ops.flash_attention_score_grad(*tensors, **options)
        return (d_query, None, None), (d_key, d_value, None)
    d_query, d_key, d_value, *d_extensions = torch.ops.ascend._flash_attention_score_extended_grad(
        *tensors, **extensions, **options
    )
    d_sink, d_query_rope, d_key_rope = (
        None if x is None else d for x, d in zip(extensions.values(), d_extensions, strict=True)
    )
    return (d_query, d_query_rope, d_sink), (d_key, d_value, d_key_rope)
