"""The public names of the package, which imports this module when one of them is used."""

from ascend_attn_ops._pages import (
    gather_paged_kv,
    nd_to_nz,
    nz_cache_shape,
    nz_to_nd,
    slot_mapping,
)
from ascend_attn_ops._statistics import log_sum_exp
from ascend_attn_ops._value_checks import check_values
from ascend_attn_ops.comparison import compare
from ascend_attn_ops.compression import compress_keys
from ascend_attn_ops.device_limits import limits, set_limits
from ascend_attn_ops.indexer_training import sparse_flash_mla_with_indexer_loss
from ascend_attn_ops.masks import sparse_mode_mask
from ascend_attn_ops.modules import LightningIndexer
from ascend_attn_ops.operators.attention_update import attention_update
from ascend_attn_ops.operators.flash_attention_score import flash_attention_score
from ascend_attn_ops.operators.flash_attention_score_grad import flash_attention_score_grad
from ascend_attn_ops.operators.fused_infer_attention_score import fused_infer_attention_score
from ascend_attn_ops.operators.lightning_indexer import lightning_indexer, lightning_indexer_grad
from ascend_attn_ops.operators.lightning_indexer_kl_loss import lightning_indexer_kl_loss
from ascend_attn_ops.operators.prompt_flash_attention import prompt_flash_attention
from ascend_attn_ops.operators.scatter_pa_kv_cache import scatter_pa_kv_cache_
from ascend_attn_ops.operators.sparse_flash_attention import sparse_flash_attention
from ascend_attn_ops.operators.sparse_flash_attention_grad import sparse_flash_attention_grad
from ascend_attn_ops.operators.sparse_flash_mla import sparse_flash_mla
from ascend_attn_ops.operators.sparse_flash_mla_grad import sparse_flash_mla_grad
from ascend_attn_ops.operators.sparse_lightning_indexer_grad_kl_loss import (
    sparse_lightning_indexer_grad_kl_loss,
)
from ascend_attn_ops.operators.sparse_lightning_indexer_kl_loss_grad import (
    sparse_lightning_indexer_kl_loss_grad,
)
from ascend_attn_ops.quantization import quantize_attention_inputs
from ascend_attn_ops.recording import record
from ascend_attn_ops.training import attach_loss, save_attention_policy

__all__ = [
    "LightningIndexer",
    "attach_loss",
    "attention_update",
    "check_values",
    "compare",
    "compress_keys",
    "flash_attention_score",
    "flash_attention_score_grad",
    "fused_infer_attention_score",
    "gather_paged_kv",
    "lightning_indexer",
    "lightning_indexer_grad",
    "lightning_indexer_kl_loss",
    "limits",
    "log_sum_exp",
    "nd_to_nz",
    "nz_cache_shape",
    "nz_to_nd",
    "prompt_flash_attention",
    "quantize_attention_inputs",
    "record",
    "save_attention_policy",
    "scatter_pa_kv_cache_",
    "set_limits",
    "slot_mapping",
    "sparse_flash_attention",
    "sparse_flash_attention_grad",
    "sparse_flash_mla",
    "sparse_flash_mla_grad",
    "sparse_flash_mla_with_indexer_loss",
    "sparse_lightning_indexer_grad_kl_loss",
    "sparse_lightning_indexer_kl_loss_grad",
    "sparse_mode_mask",
]
