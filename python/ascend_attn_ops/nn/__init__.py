"""Parts of models: attention, masks, latent attention, indexers and their training, pages."""

from ascend_attn_ops._core.pages import (
    gather_paged_kv,
    nd_to_nz,
    nz_cache_shape,
    nz_to_nd,
    slot_mapping,
)
from ascend_attn_ops._core.sparse_modes import sparse_mode_mask
from ascend_attn_ops._core.statistics import log_sum_exp
from ascend_attn_ops.nn.attention import attention
from ascend_attn_ops.nn.compression import compress_keys
from ascend_attn_ops.nn.indexer_training import sparse_flash_mla_with_indexer_loss
from ascend_attn_ops.nn.latent_attention import LatentAttention
from ascend_attn_ops.nn.lightning_indexer import LightningIndexer
from ascend_attn_ops.nn.masks import Band, Causal, CutCausal, Prefix
from ascend_attn_ops.nn.paged_cache import PagedCache
from ascend_attn_ops.nn.quantization import (
    quantize_attention_inputs,
    quantize_index_keys,
    quantize_latent,
)
from ascend_attn_ops.nn.training import attach_loss, save_attention_policy

__all__ = [
    "Band",
    "Causal",
    "CutCausal",
    "LatentAttention",
    "LightningIndexer",
    "PagedCache",
    "Prefix",
    "attach_loss",
    "attention",
    "compress_keys",
    "gather_paged_kv",
    "log_sum_exp",
    "nd_to_nz",
    "nz_cache_shape",
    "nz_to_nd",
    "quantize_attention_inputs",
    "quantize_index_keys",
    "quantize_latent",
    "save_attention_policy",
    "slot_mapping",
    "sparse_flash_mla_with_indexer_loss",
    "sparse_mode_mask",
]
