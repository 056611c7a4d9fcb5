"""The layers of A.X-K2: those of DeepSeek-V3.2, whose output has a gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.axk2 import modeling_axk2 as modeling

from ascend_attn_ops.transformers._layers import EnabledLayer
from ascend_attn_ops.transformers._sparse_attention import SparseAttention


class AXK2EnabledLayer(EnabledLayer, modeling.AXK2DecoderLayer):  # type: ignore[misc]
    pass


class AXK2SparseAttention(SparseAttention, modeling.AXK2Attention):  # type: ignore[misc]
    model = modeling.AXK2Model
    layer = modeling.AXK2DecoderLayer, AXK2EnabledLayer
    rotate = staticmethod(modeling.apply_rotary_pos_emb_interleave)
    rotate_indexer = staticmethod(modeling.apply_rotary_pos_emb)

    q_gate_proj: nn.Module

    def _query(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        projected = self.q_a_proj(hidden_states)
        compressed = self.q_a_layernorm(projected)
        heads = self.q_gate_proj(torch.cat([compressed, projected], -1))
        query, gate = heads.unflatten(-1, (self.num_heads, -1)).split(
            [self.qk_head_dim, self.v_head_dim], -1
        )
        return compressed, query, gate
