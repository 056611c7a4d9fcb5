"""The layers of DeepSeek-V3.2."""

from __future__ import annotations

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

from ascend_attn_ops.transformers._layers import EnabledLayer
from ascend_attn_ops.transformers._sparse_attention import SparseAttention


class DeepseekV32EnabledLayer(EnabledLayer, modeling.DeepseekV32DecoderLayer):  # type: ignore[misc]
    pass


class DeepseekV32SparseAttention(SparseAttention, modeling.DeepseekV32Attention):  # type: ignore[misc]
    model = modeling.DeepseekV32Model
    layer = modeling.DeepseekV32DecoderLayer, DeepseekV32EnabledLayer
    rotate = staticmethod(modeling.apply_rotary_pos_emb_interleave)
    rotate_indexer = staticmethod(modeling.apply_rotary_pos_emb)
