"""The operators on one part.

A part is a batch of one in layout BSND, which is the operators' default: some queries of a
sequence, and the keys of that sequence that they may see, which causal modes align at the end. Both
are views. Packed calls (TND) would copy the keys once per part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ascend_attn_ops import _C, ops
from ascend_attn_ops._core.arguments import INT64_MAX, wrong
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops._core.operators import ALL_TOKENS
from ascend_attn_ops.distributed._layout import Rows, Source, sum_dtype
from ascend_attn_ops.distributed.shards import SequenceShards
from ascend_attn_ops.nn.compression import check_compression
from ascend_attn_ops.nn.indexer_training import indexer_loss
from ascend_attn_ops.ops._indexer_loss import gradients_and_loss, prepared_target

# By argument. None marks an omitted one: the operators check that no required one is omitted.
Tensors = Mapping[str, Any]

# Stands for the part of a rank without tokens, where an operator wants queries.
ONE_TOKEN = Rows(number=0, row=0, sequence=0, begin=0, end=1, length=1)

# These have the tokens second to last, (1, T, N) in TND.
STATISTICS = ("softmax_max", "softmax_sum")
# All tokens share these, which have no axis of tokens.
SHARED = ("sink", "position_bias", "indexer_loss_weight")


@dataclass(frozen=True, eq=False)
class Operation:
    """An operator with its options, and how it runs on one part.

    The tensors of a part are batches of one, (1, tokens, ...); outputs have the tokens first.
    """

    name: ClassVar[str]
    # The arguments with keys.
    keys: ClassVar[tuple[str, ...]]
    # Keys that the backward alone reads.
    for_backward: ClassVar[tuple[str, ...]] = ()
    # Further arguments that autocast leaves alone.
    never_cast: ClassVar[tuple[str, ...]] = ()
    # Position of the output that is differentiable; None if a backward needs none of the tensors.
    differentiable: ClassVar[int | None] = 0
    # The option with the mode of the mask, and the argument that selects keys.
    mode: ClassVar[str] = "sparse_mode"
    indices: ClassVar[str] = "sparse_indices"

    options: dict[str, Any]

    @property
    def causal(self) -> bool:
        return bool(self.options[self.mode] == 3)

    @property
    def ratio(self) -> int:
        """How many tokens a key stands for."""
        return int(self.options.get("cmp_ratio", 1))

    def source(self, shards: SequenceShards, name: str) -> Source:
        """How the keys of an argument are gathered: all of them, by default."""
        return shards.compressed(self.ratio)

    def tokens(self, part: Rows) -> int:
        """How many tokens of the sequence have keys to pass."""
        # A causal mode aligns the last query with the last key; others see the whole sequence.
        return part.end if self.causal else part.length

    def range(self, part: Rows, name: str) -> tuple[int, int]:
        """The first of the keys of the sequence to pass, and one past the last."""
        return 0, self.tokens(part) // self.ratio

    def split(self, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        """Queries and keys."""
        keys = {name: x for name, x in tensors.items() if name in self.keys}
        return {name: x for name, x in tensors.items() if name not in keys}, keys

    def queries(self, part: Rows, queries: Tensors) -> dict[str, Any]:
        """Returns the queries of one part, of the local ones."""
        own = {
            name: x if x is None or name in SHARED else x[part.here].unsqueeze(0)
            for name, x in queries.items()
        }
        if own.get(self.indices) is not None and self.causal:
            own[self.indices] = self._read(part, own[self.indices])
        return own

    def _read(self, part: Rows, indices: Tensor) -> Tensor:
        """Empties the slots that no query reads: they may name keys that the part lacks."""
        slots, size = indices.shape[-1], self.options.get("sparse_block_size", 1)
        if (part.begin + 1) // self.ratio > (slots - 1) * size:
            return indices
        tokens = torch.arange(part.begin + 1, part.end + 1, device=indices.device)
        read = (tokens // self.ratio + (size - 1)) // size
        per_token = read.view(-1, *[1] * (indices.dim() - 2))  # with an axis of heads or without
        return indices.masked_fill(torch.arange(slots, device=indices.device) >= per_token, -1)

    def residual(self, part: Rows, like: Tensor) -> Tensor:
        """The tokens behind the last complete compressed key; filled on the device."""
        return like.new_full((1,), self.tokens(part) % self.ratio, dtype=torch.int32)

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        """The outputs of one part."""
        raise NotImplementedError

    def backward(self, part: Rows, x: Tensors, outputs: tuple[Tensor, ...], d: Tensor) -> Tensors:
        """The gradients of a part's tensors; outputs and d are its rows, tokens first."""
        raise NotImplementedError

    def finish_backward(self, shards: SequenceShards, queries: Tensors) -> None:
        """Called on all ranks after the gradients of all parts."""

    def on_meta(self, part: Rows, tensors: Tensors) -> tuple[Tensor, ...]:
        """The outputs of one part without data, of local tensors."""

        def meta(name: str, x: Tensor | None) -> Tensor | None:
            if x is None or name in SHARED:
                return x if x is None else x.to("meta")
            begin, end = self.range(part, name) if name in self.keys else (part.begin, part.end)
            return x.new_empty((1, end - begin, *x.shape[1:]), device="meta")

        with torch.no_grad():
            return self.dry_run(part, {name: meta(name, x) for name, x in tensors.items()})

    def dry_run(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        """The forward without data; raises what the backward would raise for the same tensors."""
        return self.forward(part, x)

    def check_values(self, part: Rows, x: Tensors) -> None:
        """Raise what the operator would raise for the queries of a part among all keys."""
        indices = x.get(self.indices)
        if indices is None or not indices.numel():
            return
        keys = self.tokens(part) // self.ratio
        end = -(-keys // self.options.get("sparse_block_size", 1))
        least, most = indices.aminmax()
        if least < -1 or most >= end:
            _, *at = ((indices < -1) | (indices >= end)).nonzero()[0].tolist()
            got = indices[0][tuple(at)].item()
            at[0] += part.row
            place = f"{got} at {tuple(at)} of the local tokens"
            where = f"ascend::{self.name}"
            raise wrong(ValueError, where, self.indices, f"values in [-1, {end})", place)


@dataclass(frozen=True, eq=False)
class Indexer(Operation):
    name: ClassVar[str] = "lightning_indexer"
    keys: ClassVar[tuple[str, ...]] = ("key",)
    differentiable: ClassVar[int | None] = 1

    deterministic: bool

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        residual = self.residual(part, x["query"]) if self.ratio > 1 else None
        indices, values = ops.lightning_indexer(**x, **self.options, cmp_residual_key=residual)
        return indices[0], values[0] if self.options["return_values"] else values

    def backward(self, part: Rows, x: Tensors, outputs: tuple[Tensor, ...], d: Tensor) -> Tensors:
        gradients = ops.lightning_indexer_grad(
            **x, d_values=d.unsqueeze(0), sparse_indices=outputs[0].unsqueeze(0),
            sparse_mode=self.options["sparse_mode"], deterministic=self.deterministic,
        )  # fmt: skip
        return dict(zip(("query", "key", "weights"), gradients, strict=True))


class SparseAttention(Operation):
    """sparse_flash_attention; without value, key is the value as well."""

    name: ClassVar[str] = "sparse_flash_attention"
    keys: ClassVar[tuple[str, ...]] = ("key", "value", "key_rope")

    def _keywords(self, x: Tensors) -> dict[str, Any]:
        value = x["key"] if x.get("value") is None else x["value"]
        return {**x, "value": value, **self.options}

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        out, *statistics = ops.sparse_flash_attention(**self._keywords(x))
        return out[0], *(y[0, 0] for y in statistics)

    def backward(self, part: Rows, x: Tensors, outputs: tuple[Tensor, ...], d: Tensor) -> Tensors:
        out, softmax_max, softmax_sum = outputs
        found = ops.sparse_flash_attention_grad(
            **self._keywords(x), d_out=d.unsqueeze(0), out=out.unsqueeze(0),
            softmax_max=softmax_max[None, None], softmax_sum=softmax_sum[None, None],
        )  # fmt: skip
        names = ("query", "key", "value", "query_rope", "key_rope")
        gradients = dict(zip(names, found, strict=True))
        if x.get("value") is None:
            d_key = gradients["key"]
            gradients["key"] = d_key.to(sum_dtype(d_key)) + gradients["value"]
        return gradients


class IndexerLoss(Operation):
    """lightning_indexer_kl_loss.

    Outputs: the gradients of `TRAINED` and the loss of one part, (1,).
    """

    TRAINED: ClassVar[tuple[str, ...]] = ("query_index", "key_index", "weights")
    name: ClassVar[str] = "lightning_indexer_kl_loss"
    keys: ClassVar[tuple[str, ...]] = ("key_index", "key", "key_rope")
    differentiable: ClassVar[int | None] = None

    def check_values(self, part: Rows, x: Tensors) -> None:
        super().check_values(part, x)
        if x["softmax_max"] is None:
            return
        # The operator reads no statistics of tokens whose weight is 0.
        read = slice(None) if x["token_weight"] is None else x["token_weight"] != 0
        _C.check_statistics(self.name, *(x[name][read] for name in STATISTICS))

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        call = {**x, **{name: x[name].unsqueeze(0) for name in STATISTICS}}
        call.pop("target", None)
        return ops.sparse_lightning_indexer_grad_kl_loss(**call, **self.options)


@dataclass(frozen=True, eq=False)
class IndexerLossWithTarget(IndexerLoss):
    keys: ClassVar[tuple[str, ...]] = ("key_index",)
    never_cast: ClassVar[tuple[str, ...]] = ("weights", "target")

    normalize_target: bool

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        indices, options = x["sparse_indices"], self.options
        target, factors = prepared_target(
            x["target"], indices, x.get("token_weight"), self.normalize_target
        )
        if self.ratio > 1:
            options = {**options, "cmp_residual_key": self.residual(part, x["query_index"])}
        return gradients_and_loss(
            x["query_index"], x["key_index"], x["weights"], indices, target, factors, options
        )


@dataclass(frozen=True, eq=False)
class DenseAttention(Operation):
    """flash_attention_score; outputs: out (tokens, N, Dv), both statistics (tokens, N, 8)."""

    name: ClassVar[str] = "flash_attention_score"
    keys: ClassVar[tuple[str, ...]] = ("key", "value", "key_rope")

    # Among how many the heads are divided, which the operator has to accept.
    ranks: int = 1

    def on_meta(self, part: Rows, tensors: Tensors) -> tuple[Tensor, ...]:
        if self.ranks == 1:
            return super().on_meta(part, tensors)
        # A share no longer shows what is wrong with the whole.
        with limits(None):
            super().on_meta(part, tensors)
        heads = {name: x.shape[-2] for name, x in tensors.items() if x is not None and x.dim() > 2}
        heads = {"num_heads": self.options["num_heads"], **heads}
        for name, count in heads.items():
            if count % self.ranks:
                text = f"that the {self.ranks} ranks divide (method 'ulysses')"
                expected = f"a number of heads {text}"
                raise wrong(ValueError, f"ascend::{self.name}", name, expected, str(count))
        share = {
            name: x if x is None else x.chunk(self.ranks, 0 if name in SHARED else 1)[0]
            for name, x in tensors.items()
        }
        one = DenseAttention({**self.options, "num_heads": heads["num_heads"] // self.ranks})
        return one.on_meta(part, share)

    def tokens(self, part: Rows) -> int:
        if self.options["sparse_mode"] != 4:
            return super().tokens(part)
        return min(max(part.end + self.options["next_tokens"], 1), part.length)

    def _of_part(self, part: Rows, x: Tensors) -> dict[str, Any]:
        """The options of a call with the first keys of the part's sequence."""
        if self.options["sparse_mode"] != 4:
            return self.options
        # The operator counts from the diagonal to the bottom right, which query `begin` + i meets
        # at key i + keys - count.
        shift = x["key"].shape[1] - part.count - part.begin
        moved = {"pre_tokens": shift, "next_tokens": -shift}
        band = {name: min(self.options[name] + by, ALL_TOKENS) for name, by in moved.items()}
        return {**self.options, **band}

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        out, *statistics = ops.flash_attention_score(**x, **self._of_part(part, x))
        return out[0], *(y[0].transpose(0, 1) for y in statistics)

    def backward(self, part: Rows, x: Tensors, outputs: tuple[Tensor, ...], d: Tensor) -> Tensors:
        out, *statistics = (y.unsqueeze(0) for y in outputs)
        softmax_max, softmax_sum = (y.transpose(1, 2) for y in statistics)
        extended = any(name in x for name in ("sink", "query_rope", "key_rope"))
        name = "_flash_attention_score_extended_grad" if extended else "flash_attention_score_grad"
        found = getattr(torch.ops.ascend, name)(
            **x, dy=d.unsqueeze(0), softmax_max=softmax_max, softmax_sum=softmax_sum,
            attention_in=out, **self._of_part(part, x),
        )  # fmt: skip
        names = ("query", "key", "value", "sink", "query_rope", "key_rope")
        return dict(zip(names, found, strict=False))


class CompressedAttention(Operation):
    """sparse_flash_mla."""

    name: ClassVar[str] = "sparse_flash_mla"
    keys: ClassVar[tuple[str, ...]] = ("ori_kv", "cmp_kv")
    mode: ClassVar[str] = "cmp_mask_mode"
    indices: ClassVar[str] = "cmp_sparse_indices"
    # The arguments of the attention.
    tensors: ClassVar[tuple[str, ...]] = ("query", "ori_kv", "cmp_kv", "cmp_sparse_indices", "sink")

    def source(self, shards: SequenceShards, name: str) -> Source:
        if name != "ori_kv":
            return super().source(shards, name)
        window = self.options["ori_win_left"], self.options["ori_win_right"]
        if self.options["ori_mask_mode"] == 4 and min(window) >= 0:
            return shards._ranges_around(("window", *window), self._window)
        return shards

    def _window(self, part: Rows) -> tuple[int, int]:
        """The tokens that the queries of a part see; modes 0 and 3 have no window."""
        left, right = {
            3: (-1, 0), 4: (self.options["ori_win_left"], self.options["ori_win_right"]),
        }.get(self.options["ori_mask_mode"], (-1, -1))  # fmt: skip
        begin = 0 if left < 0 else max(part.begin - left, 0)
        return begin, part.length if right < 0 else min(part.end + right, part.length)

    def range(self, part: Rows, name: str) -> tuple[int, int]:
        return self._window(part) if name == "ori_kv" else super().range(part, name)

    def _of_part(self, part: Rows, x: Tensors) -> dict[str, Any]:
        """The tensors and options of a call."""
        call = {**self.options, **{name: x.get(name) for name in self.tensors}}
        # The operator aligns the last query with the last key, which may be a later token.
        shift = self._window(part)[1] - part.end
        if shift and call["ori_mask_mode"] == 4:
            if call["ori_win_left"] >= 0:
                call["ori_win_left"] = min(call["ori_win_left"] + shift, INT64_MAX)
            if call["ori_win_right"] >= 0:
                call["ori_win_right"] -= shift
        if call["cmp_kv"] is not None:
            call["cmp_residual_kv"] = self.residual(part, x["query"])
        return call

    def forward(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        out, softmax_lse = ops.sparse_flash_mla(**self._of_part(part, x))
        return out[0], softmax_lse[0, 0]

    def backward(self, part: Rows, x: Tensors, outputs: tuple[Tensor, ...], d: Tensor) -> Tensors:
        """Also the target of an indexer."""
        out, softmax_lse = outputs
        found = ops.sparse_flash_mla_grad(
            **self._of_part(part, x), d_out=d.unsqueeze(0), out=out.unsqueeze(0),
            softmax_lse=softmax_lse[None, None],
        )  # fmt: skip
        return dict(zip(("query", "ori_kv", "cmp_kv", "sink", "target"), found, strict=True))


@dataclass(frozen=True, eq=False)
class AttentionWithLoss(CompressedAttention):
    """sparse_flash_mla_with_indexer_loss."""

    name: ClassVar[str] = "sparse_flash_mla_with_indexer_loss"
    keys: ClassVar[tuple[str, ...]] = (*CompressedAttention.keys, "key_index")
    for_backward: ClassVar[tuple[str, ...]] = ("key_index",)
    never_cast: ClassVar[tuple[str, ...]] = ("weights",)

    # Whether a gradient of the indexer is required.
    trained: bool
    factor: Any  # a float; None for a tensor, which is one of the queries
    on_loss: Callable[[Tensor], None] | None
    # The parts of a backward add theirs.
    losses: list[Tensor]

    def dry_run(self, part: Rows, x: Tensors) -> tuple[Tensor, ...]:
        outputs = self.forward(part, x)
        # A rank without tokens has no keys for the backward when it makes its empty outputs.
        if self.trained and x.get("key_index") is not None:
            self._learn(part, x, torch.empty_like(x[self.indices], dtype=outputs[1].dtype))
        return outputs

    def _learn(self, part: Rows, x: Tensors, target: Tensor) -> tuple[Tensor, ...]:
        """The gradients of query_index, key_index and weights, and the softmax of the scores."""
        return ops.sparse_lightning_indexer_kl_loss_grad(
            x["query_index"], x["key_index"], x["weights"], x[self.indices], target,
            cmp_residual_key=self.residual(part, x["query"]), sparse_mode=self.options[self.mode],
            cmp_ratio=self.ratio, deterministic=self.options["deterministic"],
        )  # fmt: skip

    def backward(self, part: Rows, x: Tensors, outputs: tuple[Tensor, ...], d: Tensor) -> Tensors:
        gradients = dict(super().backward(part, x, outputs, d))
        if self.trained:
            target = gradients["target"]
            *found, softmax = self._learn(part, x, target)
            for name, d_indexer in zip(IndexerLoss.TRAINED, found, strict=True):
                weight = self.factor
                if weight is None:
                    weight = x["indexer_loss_weight"].to(d_indexer.dtype)
                gradients[name] = d_indexer * weight
            if self.on_loss is not None:
                self.losses.append(indexer_loss(target, softmax.view(target.shape)).reshape(1))
        return gradients

    def finish_backward(self, shards: SequenceShards, queries: Tensors) -> None:
        if self.trained and self.on_loss is not None:
            query = queries["query"]
            total = sum(self.losses, start=query.new_zeros(1, dtype=sum_dtype(query)))
            self.losses.clear()
            self.on_loss(shards.all_reduce(total))


class Compression(Operation):
    """The arguments of compress_keys."""

    name: ClassVar[str] = "compress_keys"
    keys: ClassVar[tuple[str, ...]] = ()
    never_cast: ClassVar[tuple[str, ...]] = ("values", "logits")

    def on_meta(self, part: Rows, tensors: Tensors) -> tuple[Tensor, ...]:
        check_compression(**tensors, overlap=self.options["overlap"], axes=2)
        return ()
