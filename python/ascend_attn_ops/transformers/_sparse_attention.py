"""The attention layers of models with an indexer, over this library's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ascend_attn_ops import ops
from ascend_attn_ops.nn.latent_attention import LatentInputs, absorb, expand
from ascend_attn_ops.nn.lightning_indexer import IndexerProjections
from ascend_attn_ops.nn.training import attach_loss
from ascend_attn_ops.transformers._layers import (
    EnabledAttention,
    Options,
    Tokens,
    cache_of,
    wrong_layer,
)

Rotate = Callable[..., tuple[Tensor, Tensor]]


def folded_weight(layer: Any) -> Tensor:
    """That of kv_b_proj, with peft's LoRA adapters: no forward that wraps it is called."""
    projection, added = layer.kv_b_proj, []
    if hasattr(projection, "get_delta_weight") and not getattr(projection, "lora_variant", None):
        names = [] if projection.merged or projection.disable_adapters else projection.lora_A
        names = [x for x in projection.active_adapters if x in names]
        drops = any(getattr(projection.lora_dropout[x], "p", 0) for x in names)
        if not (drops and layer.training):
            added = [projection.get_delta_weight(x) for x in names]
            projection = projection.get_base_layer()
    if type(projection) is not nn.Linear:
        expected = "a plain nn.Linear, or one with LoRA adapters without dropout"
        got = f"{type(projection).__name__}; merge other adapters and dequantize before"
        raise wrong_layer(layer, "kv_b_proj", expected, got)
    return sum(added, start=projection.weight)


class SparseAttention(EnabledAttention):
    """The attention of DeepSeek-V3.2 and GLM-MoE-DSA.

    All heads attend to the cached latent itself: the projections that make keys and values of it
    are folded into the query and into the output (absorbed MLA), so that per-head keys and values
    never exist.
    """

    rotate: ClassVar[Rotate]
    """The rotary embedding, of (B, S, heads, size) with unsqueeze_dim=2."""
    rotate_indexer: ClassVar[Rotate]
    """The rotary embedding of the indexer."""

    # Attributes of both models' layers.
    scaling: float
    num_heads: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: nn.Module
    indexer: Any

    @classmethod
    def check_layer(cls, layer: Any, options: Options) -> None:
        super().check_layer(layer, options)
        folded_weight(layer)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tokens,
        prev_topk_indices: Tensor | None = None,
        indexer_losses: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        self.check_call(attention_mask, kwargs)
        tokens, options, cache = attention_mask, self.dsa.options, cache_of(kwargs)
        if options.dense_warmup:
            hidden_states = hidden_states.detach()

        compressed_query, query, gate = self._query(hidden_states)
        query, query_rope, latent, key_rope = self._project(
            hidden_states, query, position_embeddings
        )
        if cache is not None:
            latent, key_rope = cache.update(latent, key_rope, self.layer_idx)
        # (B, 1, keys, size), as the cache has it, to (B, keys, 1, size); under autocast the norm
        # returns float32.
        query, query_rope, latent, key_rope = (
            tokens.arrange(x.to(query.dtype))
            for x in (query, query_rope, latent.transpose(1, 2), key_rope.transpose(1, 2))
        )
        indexed = None
        if self.indexer is not None:
            # The indexer learns to imitate the attention, and must not change it.
            indexed = self._index(
                hidden_states.detach(),
                compressed_query.detach(),
                position_embeddings,
                cache,
                tokens,
                query.dtype,
            )
        inputs = LatentInputs(query, query_rope, latent, key_rope, indexed)
        indices = self._select(indexed, tokens, prev_topk_indices)
        out, *statistics = inputs.attend(indices, self.scaling, **tokens.options())

        _, value_weight = self._absorbed_weights()
        values = expand(out, value_weight.mT).reshape(*hidden_states.shape[:-1], -1)
        if gate is not None:
            values = (values * torch.sigmoid(gate.flatten(-2).float())).to(values.dtype)
        output = self.o_proj(values)

        if indexed is not None and self._learns(cache):
            # The mean of the tokens that are no padding.
            valid = None if tokens.sequences is None else tokens.sequences.valid
            loss = inputs.indexer_loss(
                indices, statistics, self.scaling, token_weight=valid, **tokens.options()
            )
            if indexer_losses is None:
                self.dsa.loss = loss.detach()
            else:
                indexer_losses.append(loss.detach())
            output = attach_loss(output, loss, scale=options.indexer_loss_weight)
        return self._results(output, indices)

    def _results(self, output: Tensor, indices: Tensor) -> tuple[Tensor | None, ...]:
        return output, None

    def _absorbed_weights(self) -> list[Tensor]:
        """The projections of latents to keys, (N, Dn, C), and to values, (N, Dv, C)."""
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        weight = folded_weight(self)
        # FSDP2 has gathered its shards by now.
        if isinstance(weight, DTensor):
            got = "a DTensor; load without tensor parallelism"
            raise wrong_layer(self, "kv_b_proj.weight", "a plain tensor in the forward", got)
        weight = weight.view(self.num_heads, sum(sizes), self.kv_lora_rank)
        return list(weight.split(sizes, dim=1))

    def _query(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The indexer's input, (B, S, rank), the query and a gate of the output, (B, S, N, size)
        each."""
        compressed = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(compressed).unflatten(-1, (self.num_heads, self.qk_head_dim))
        return compressed, query, None

    def _project(
        self,
        hidden_states: Tensor,
        query: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query and its rope, (B, S, N, size); latent and its rope, (B, 1, S, size)."""
        query, query_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        key_weight, _ = self._absorbed_weights()
        query = absorb(query, key_weight)

        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, key_rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        query_rope, key_rope = type(self).rotate(
            query_rope, key_rope.unsqueeze(2), *position_embeddings, unsqueeze_dim=2
        )
        return query, query_rope, self.kv_a_layernorm(latent).unsqueeze(1), key_rope.transpose(1, 2)

    def _index(
        self,
        hidden_states: Tensor,
        compressed_query: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        tokens: Tokens,
        dtype: torch.dtype,
    ) -> IndexerProjections:
        """Queries, keys and weights of the indexer, in the layout of the operators."""
        indexer = self.indexer
        query = indexer.wq_b(compressed_query).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        # Under autocast in float32 on every device; that of the CPU lets the norm be in bfloat16.
        key = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype)).unsqueeze(2)
        rope = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
        (query_rope, query), (key_rope, key) = query.split(rope, -1), key.split(rope, -1)
        query_rope, key_rope = type(self).rotate_indexer(
            query_rope, key_rope, *position_embeddings, unsqueeze_dim=2
        )
        query = torch.cat([query_rope, query], dim=-1)
        key = torch.cat([key_rope, key], dim=-1)
        if cache is not None:
            key = cache.update_indexer(key.squeeze(2), self.layer_idx).unsqueeze(2)
        # The model keeps this projection in float32. Both scales are positive: relu lets them by.
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        dtype = self.dsa.options.indexer_dtype or dtype
        if self.dsa.options.indexer_dtype is not None:
            weights = weights.to(dtype)
        return IndexerProjections(
            tokens.arrange(query.to(dtype)),
            tokens.arrange(key.to(dtype)),
            tokens.arrange(weights),
        )

    def _select(
        self,
        indexed: IndexerProjections | None,
        tokens: Tokens,
        of_previous_layer: Tensor | None,
    ) -> Tensor:
        if tokens.every_key is not None:
            return tokens.every_key
        if indexed is None:
            if of_previous_layer is None:
                expected = "an indexer, or a layer before with one: see config.indexer_types"
                raise wrong_layer(self, "indexer", expected, "neither", ValueError)
            return of_previous_layer
        query, key, weights = (x.detach() for x in indexed)
        count = self.indexer.index_topk
        options = tokens.options()
        return ops.lightning_indexer(query, key, weights, sparse_count=count, **options)[0]

    def _learns(self, cache: Any) -> bool:
        # Reentrant checkpointing runs its first forward without gradients, and has no cache.
        training = self.training and cache is None
        return (torch.is_grad_enabled() or training) and any(
            parameter.requires_grad for parameter in self.indexer.parameters()
        )
