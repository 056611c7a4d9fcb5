"""The layers of GLM-MoE-DSA, which also return the keys that they select."""

from __future__ import annotations

from torch import Tensor
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

from ascend_attn_ops.transformers._layers import EnabledLayer
from ascend_attn_ops.transformers._sparse_attention import SparseAttention


class GlmMoeDsaEnabledLayer(EnabledLayer, modeling.GlmMoeDsaDecoderLayer):  # type: ignore[misc]
    pass


class GlmMoeDsaSparseAttention(SparseAttention, modeling.GlmMoeDsaAttention):  # type: ignore[misc]
    model = modeling.GlmMoeDsaModel
    layer = modeling.GlmMoeDsaDecoderLayer, GlmMoeDsaEnabledLayer
    rotate = staticmethod(modeling.apply_rotary_pos_emb_interleave)
    rotate_indexer = staticmethod(modeling.apply_rotary_pos_emb_interleave)

    def _results(self, output: Tensor, indices: Tensor) -> tuple[Tensor | None, ...]:
        return output, None, indices
