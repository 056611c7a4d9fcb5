"""The layers of DeepSeek-V4: a window of keys, compressed keys and a sink in one softmax."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from ascend_attn_ops import ops
from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.packing import lengths_between
from ascend_attn_ops.nn.compression import compress_keys, first_tokens
from ascend_attn_ops.nn.indexer_training import attention_with_indexer_loss, indexer_loss
from ascend_attn_ops.transformers._layers import (
    CACHE,
    EnabledAttention,
    Options,
    State,
    Tokens,
    cache_of,
    wrong_layer,
)

_rotate = modeling.apply_rotary_pos_emb
_INDEXER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_indexer(indexer: nn.Module, layer: Any) -> None:
    """Raises where a weight of the indexer is quantized: it could not learn."""
    for name, x in (*indexer.named_parameters(), *indexer.named_buffers()):
        if x.dtype not in _INDEXER_DTYPES:
            got = f"{x.dtype}; dequantize the model when it is loaded"
            expected = "weights of float16, bfloat16, float32 or float64"
            raise wrong_layer(layer, f"indexer.{name}", expected, got)


class DeepseekV4CompressedAttention(EnabledAttention, modeling.DeepseekV4Attention):  # type: ignore[misc]
    """One key head, whose keys are the values too: of a window, and of compressed tokens.

    The values carry the rotation of their positions into the output, which is taken out of it.
    """

    model = modeling.DeepseekV4Model
    takes_padding = False

    config: Any
    rope_layer_type: str
    compressor: Any
    q_a_proj: Any
    q_a_norm: Any
    q_b_proj: Any
    q_b_norm: Any
    kv_proj: Any
    kv_norm: Any
    o_a_proj: Any
    o_b_proj: Any
    sinks: Tensor
    sliding_window: int

    @classmethod
    def check_layer(cls, layer: Any, options: Options) -> None:
        super().check_layer(layer, options)
        if options.dense_warmup:
            expected = "False for DeepSeek-V4, whose indexers learn from the keys that they select"
            raise wrong(NotImplementedError, "enable_dsa", "dense_warmup", expected, "True")
        indexer = getattr(layer.compressor, "indexer", None)
        if indexer is not None:
            check_indexer(indexer, layer)

    def state(self, options: Options) -> State:
        return State(options, self.kv_proj.weight.device)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        position_ids: Tensor,
        attention_mask: Tokens,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        self.check_call(attention_mask, kwargs)
        cos, sin = position_embeddings[self.rope_layer_type]
        compressed_query = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(compressed_query).unflatten(-1, (self.num_heads, self.head_dim))
        query = _rotate(self.q_b_norm(query), cos, sin, unsqueeze_dim=2)
        key = _rotate(self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(1), cos, sin)
        cache = cache_of(kwargs)
        if cache is not None:
            key, _ = cache.update(key, key, self.layer_idx)
            self._check_cache(cache.layers[self.layer_idx])

        out = self._attend(
            query, key.to(query.dtype).transpose(1, 2), hidden_states, compressed_query,
            (cos, sin), _Batch(attention_mask, position_ids, cache, self.layer_idx),
        )  # fmt: skip
        out = _rotate(out.view_as(query), cos, -sin, unsqueeze_dim=2)
        grouped = out.reshape(*hidden_states.shape[:-1], self.config.o_groups, -1)
        return self.o_b_proj(self.o_a_proj(grouped).flatten(2)), None

    def _check_cache(self, cache: Any) -> None:
        if self.compressor is not None and not isinstance(cache, modeling.DeepseekV4HCACache):
            expected = "one of compressed keys, as DynamicCache(config=model.config) has it"
            raise wrong_layer(self, CACHE, expected, type(cache).__name__)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        hidden_states: Tensor,
        compressed_query: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: _Batch,
    ) -> Tensor:
        statistics_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        arrange = batch.tokens.arrange
        attention: dict[str, Any] = {
            "scale_value": self.scaling,
            "sink": self.sinks.to(statistics_dtype),
            "ori_win_left": self.sliding_window - 1,
            **batch.lengths(),
        }
        if self.compressor is None:
            return ops.sparse_flash_mla(arrange(query), arrange(key), **attention)[0]
        compressed = batch.compress(self.compressor, "compressor", hidden_states)
        # The indexer learns to imitate the attention, and must not change it.
        hidden_states, compressed_query = hidden_states.detach(), compressed_query.detach()
        indexer = getattr(self.compressor, "indexer", None)
        if indexer is not None:
            key_index = batch.compress(indexer, "indexer", hidden_states)
        if compressed.shape[-3] == 0:
            return ops.sparse_flash_mla(arrange(query), arrange(key), **attention)[0]
        ratio = self.compressor.compress_rate
        keys = arrange(query), arrange(key), compressed.to(query.dtype)
        attention = {**attention, **batch.compressed_lengths(ratio, compressed)}
        if indexer is None:
            return ops.sparse_flash_mla(*keys, **attention)[0]
        query_index = indexer.q_b_proj(compressed_query).unflatten(-1, (-1, indexer.head_dim))
        query_index = _rotate(query_index, *rotation, unsqueeze_dim=2)
        scorer = indexer.scorer
        # relu lets both scales by: they are positive.
        weights = scorer.weights_proj(hidden_states).to(statistics_dtype)
        weights = weights * (scorer.weights_scaling * scorer.softmax_scale)
        dtype = self.dsa.options.indexer_dtype or query.dtype
        indexed = arrange(query_index.to(dtype)), key_index.to(dtype), arrange(weights)

        lengths = {
            "layout": attention.get("layout", "BSND"),
            "actual_seq_lengths_query": attention.get("actual_seq_lengths_query"),
            "actual_seq_lengths_key": attention.get("actual_seq_lengths_cmp_kv"),
            "cmp_residual_key": attention.get("cmp_residual_kv"),
        }
        indices, _ = ops.lightning_indexer(
            *(x.detach() for x in indexed), sparse_count=indexer.index_topk, cmp_ratio=ratio,
            **lengths,
        )  # fmt: skip
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in indexer.parameters()):
            return ops.sparse_flash_mla(*keys, indices, **attention)[0]
        valid = batch.tokens.valid
        rows = hidden_states.shape[:-1].numel() if valid is None else valid.sum().clamp(min=1)
        return attention_with_indexer_loss(
            *keys, indices, *indexed, **attention,
            indexer_loss_weight=self.dsa.options.indexer_loss_weight / rows,
            on_results=partial(_mean_loss, rows), probe=self.dsa.probe, token_weight=valid,
        )  # fmt: skip


def _mean_loss(rows: int | Tensor, target: Tensor, softmax: Tensor) -> Tensor:
    # Less the entropy of a row's share: so it is no less than 0, and has the same gradient.
    mass = target.sum(-1)
    return (indexer_loss(target, softmax) - torch.xlogy(mass, mass).sum()) / rows


class _Batch:
    """The tokens of a call and their cache."""

    def __init__(self, tokens: Tokens, position_ids: Tensor, cache: Any, layer: int) -> None:
        self.tokens = tokens
        self._position_ids = position_ids
        self._cache = None if cache is None else cache.layers[layer]
        sequences = tokens.sequences
        # Packed sequences are found on the host.
        self._ends = None if sequences is None else cast("list[int]", sequences.query_ends)

    def lengths(self) -> dict[str, Any]:
        if self._ends is None:
            return {}
        return {
            "layout": "TND",
            "actual_seq_lengths_query": self._ends,
            "actual_seq_lengths_ori_kv": self._ends,
        }

    def compressed_lengths(self, ratio: int, compressed: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"cmp_ratio": ratio}
        if self._ends is not None:
            whole = (length // ratio for length in lengths_between(self._ends))
            given["actual_seq_lengths_cmp_kv"] = list(accumulate(whole))
        elif self._cache is not None:
            # The window's keys are fewer than the tokens that the compressed ones stand for.
            batch, keys = compressed.shape[:2]
            seen = self._cache.cumulative_length
            given["cmp_residual_kv"] = torch.full(
                (batch,), seen - keys * ratio, dtype=torch.int32, device=compressed.device
            )
        return given

    def compress(self, compressor: Any, name: str, hidden_states: Tensor) -> Tensor:
        """The compressed keys so far, (B, T, 1, D), or (T, 1, D) of packed sequences."""
        values, logits = compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)
        ratio, bias = compressor.compress_rate, compressor.position_bias
        options: dict[str, Any] = {"overlap": values.shape[-1] != compressor.head_dim}
        if self._ends is not None:
            values, logits = values.flatten(0, 1), logits.flatten(0, 1)
            options["actual_seq_lengths"] = self._ends
            ids = self._position_ids.expand(hidden_states.shape[:2]).flatten()
            starts = torch.tensor(first_tokens(self._ends, ratio), device=values.device)
            ids = ids[starts].unsqueeze(0)
        else:
            begin = 0
            if self._cache is not None:
                values, logits, begin = self._cache.store_compression_weights(name, values, logits)
                if options["overlap"] and values.shape[1]:
                    windows = values.unflatten(1, (-1, ratio)), logits.unflatten(1, (-1, ratio))
                    before = self._cache.update_overlap_state(
                        name, windows[0], windows[1] + bias, compressor.head_dim
                    )
                    options["previous"] = before if before[0] is not None else None
            count = values.shape[1] // ratio
            ids = torch.arange(count, device=values.device) * ratio + begin
            ids = ids.unsqueeze(0).expand(len(hidden_states), -1)
        keys = compressor.kv_norm(compress_keys(values, logits, bias, **options))
        cos, sin = compressor.rotary_emb(keys, position_ids=ids, layer_type="compress")
        keys = keys.view(*ids.shape, 1, keys.shape[-1])
        keys = _rotate(keys, cos, sin, unsqueeze_dim=2)
        if self._ends is not None:
            return keys.squeeze(0)
        if self._cache is not None:
            keys = self._cache.update_compressor_states(name, keys.squeeze(2)).unsqueeze(2)
        return keys
