"""Which operators of torch_npu and of others are computed, each with what computes it.

A row names the operator of this library, and beside it only what differs: other names of arguments
than in `NAMES`, values that alone are computed, and the function where there is more to do.
"""

from __future__ import annotations

from ascend_attn_ops._core.operators import ALL_TOKENS_SPARSE
from ascend_attn_ops.torch_npu import cann_ops, inference, layers, merging, sparse
from ascend_attn_ops.torch_npu import fusion_attention as fusion
from ascend_attn_ops.torch_npu.translation import Translation

# How the device makes the mask of dropout, which does not change it.
_MASKS = ("gen_mask_parallel", "sync")
# Absorbed latent attention, the mode that has ropes and one head of keys.
_ABSORBED = {"attention_mode": [2]}
_INT8 = {**_ABSORBED, "quant_scale_repo_mode": [1]}  # with the scales in the rows of the keys
# The gradient that knows sinks and ropes.
_FUSION_GRAD = "_flash_attention_score_extended_grad"
_FUSED = "fused_infer_attention_score"
_NAMES = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
_FUSED_ONLY: dict[str, list[object]] = {
    "input_layout": [
        "BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND",
        "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD",
    ],
    "sparse_mode": [0, 1, 2, 3, 4],
}  # fmt: skip
_QUANT_MODES = {
    "key_quant_mode": "key_antiquant_mode", "value_quant_mode": "value_antiquant_mode",
}  # fmt: skip
_KL_LOSS_GRAD = "sparse_lightning_indexer_kl_loss_grad"
_METADATA = ("metadata",)
_NO_BAND = {"pre_tokens": [ALL_TOKENS_SPARSE], "next_tokens": [ALL_TOKENS_SPARSE]}

TABLE = [
    # Dense attention.
    Translation("npu::npu_fusion_attention", "flash_attention_score", fusion.forward,
                without_effect=_MASKS, differentiable=True),
    Translation("npu::npu_fusion_attention_v2", "flash_attention_score", fusion.forward,
                without_effect=_MASKS, differentiable=True),
    Translation("npu::npu_fusion_attention_v3", "flash_attention_score", fusion.forward_v3,
                without_effect=_MASKS, differentiable=True),
    Translation("npu::npu_fusion_attention_grad", _FUSION_GRAD, fusion.grad,
                without_effect=_MASKS),
    Translation("npu::npu_fusion_attention_grad_v2", _FUSION_GRAD, fusion.grad_v2,
                without_effect=_MASKS),
    Translation("npu::npu_fusion_attention_grad_v3", _FUSION_GRAD, fusion.grad_v3,
                without_effect=_MASKS),
    # For inference.
    Translation("npu::npu_prompt_flash_attention", "prompt_flash_attention", inference.prompt,
                only={"input_layout": ["BSH", "BSND", "BNSD", "BNSD_BSND", "NSD"]}),
    Translation("npu::npu_incre_flash_attention", _FUSED, inference.one_token,
                names={"actual_seq_lengths": "actual_seq_lengths_key"},
                only={"input_layout": ["BSH", "BSND", "BNSD"]}),
    *(Translation(f"npu::{name}", _FUSED, inference.fused, only=_FUSED_ONLY, names=_QUANT_MODES)
      for name in _NAMES),
    *(Translation(f"npu::{name}.out", _FUSED, inference.fused_out, only=_FUSED_ONLY,
                  names=_QUANT_MODES, without_effect=("workspace",)) for name in _NAMES),
    *(Translation(f"npu::_{name}_get_max_workspace", inference.workspace) for name in _NAMES),
    Translation("atb::_npu_paged_attention", inference.paged, without_effect=("workspace",)),
    Translation("atb::_npu_paged_attention_get_workspace", inference.workspace),
    # Sparse attention and the indexer.
    Translation("npu::npu_sparse_flash_attention", "sparse_flash_attention", sparse.attention,
                only=_ABSORBED, differentiable=True),
    Translation("npu::npu_sparse_flash_attention_grad", "sparse_flash_attention_grad",
                sparse.attention_grad, only=_ABSORBED),
    Translation("npu::npu_kv_quant_sparse_flash_attention", "kv_quant_sparse_flash_attention",
                sparse.attention_over_int8, only=_INT8),
    Translation("npu::npu_lightning_indexer", "lightning_indexer", sparse.indexer,
                differentiable=True),
    Translation("npu::npu_lightning_indexer_grad", "lightning_indexer_grad",
                names={"dy": "d_values"}, only=_NO_BAND),
    Translation("npu::npu_quant_lightning_indexer", "quant_lightning_indexer",
                sparse.quant_indexer),
    Translation("npu::npu_sparse_lightning_indexer_grad_kl_loss",
                "sparse_lightning_indexer_grad_kl_loss", sparse.loss, only=_NO_BAND),
    # vLLM-Ascend's operators, and those of cann_ops_transformer.
    Translation("_C_ascend::npu_lightning_indexer", "lightning_indexer", sparse.indexer),
    Translation("_C_ascend::npu_lightning_indexer_quant", "quant_lightning_indexer",
                sparse.quant_indexer),
    Translation("_C_ascend::npu_sparse_flash_attention", "sparse_flash_attention",
                sparse.attention, only=_ABSORBED),
    Translation("_C_ascend::npu_kv_quant_sparse_flash_attention", "kv_quant_sparse_flash_attention",
                sparse.attention_over_int8, only={**_INT8, "return_softmax_lse": [False]}),
    Translation("_C_ascend::npu_sparse_attn_sharedkv_metadata", cann_ops.metadata),
    Translation("_C_ascend::npu_sparse_attn_sharedkv", "sparse_flash_mla", cann_ops.attention,
                only={"return_softmax_lse": [False]}, without_effect=_METADATA),
    Translation("cann_ops_transformer::lightning_indexer_metadata", cann_ops.metadata),
    Translation("cann_ops_transformer::lightning_indexer", "lightning_indexer", cann_ops.indexer,
                without_effect=("metadata", "max_seqlen_q")),
    Translation("cann_ops_transformer::sparse_flash_mla_metadata", cann_ops.metadata),
    Translation("cann_ops_transformer::sparse_flash_mla", "sparse_flash_mla", cann_ops.attention,
                without_effect=_METADATA),
    Translation("cann_ops_transformer::sparse_flash_mla_grad_metadata", cann_ops.metadata),
    Translation("cann_ops_transformer::sparse_flash_mla_grad", "sparse_flash_mla_grad",
                cann_ops.attention_grad, names={"dout": "d_out", "attn_out": "out"},
                without_effect=_METADATA),
    Translation(f"cann_ops_transformer::{_KL_LOSS_GRAD}_metadata", cann_ops.metadata),
    Translation(f"cann_ops_transformer::{_KL_LOSS_GRAD}", _KL_LOSS_GRAD, cann_ops.loss_grad,
                names={"q": "query_index", "k": "key_index"}, without_effect=_METADATA),
    # Caches, merging and layers.
    Translation("npu::npu_scatter_pa_kv_cache", "scatter_pa_kv_cache_"),
    Translation("atb::_npu_reshape_and_cache", "scatter_pa_kv_cache_"),
    Translation("npu::npu_attention_update", "attention_update", merging.attention_update),
    Translation("npu::npu_ring_attention_update", merging.ring_attention_update),
    Translation("npu::npu_rms_norm", layers.rms_norm, differentiable=True),
    Translation("npu::npu_rms_norm_backward", layers.rms_norm_backward),
    Translation("npu::npu_add_rms_norm", layers.add_rms_norm, differentiable=True),
    Translation("npu::npu_rotary_mul", layers.rotary_mul, differentiable=True),
    Translation("npu::npu_rotary_mul_backward", layers.rotary_mul_backward),
    Translation("npu::npu_swiglu", layers.swiglu, differentiable=True),
    Translation("npu::npu_swiglu_backward", layers.swiglu_backward),
]  # fmt: skip
