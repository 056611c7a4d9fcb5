"""The operators and their gradients: signature, documentation, one call of ``torch.ops.ascend``."""

from ascend_attn_ops.ops.attention_update import attention_update
from ascend_attn_ops.ops.flash_attention_score import flash_attention_score
from ascend_attn_ops.ops.flash_attention_score_grad import flash_attention_score_grad
from ascend_attn_ops.ops.fused_infer_attention_score import fused_infer_attention_score
from ascend_attn_ops.ops.kv_quant_sparse_flash_attention import kv_quant_sparse_flash_attention
from ascend_attn_ops.ops.lightning_indexer import lightning_indexer, lightning_indexer_grad
from ascend_attn_ops.ops.lightning_indexer_kl_loss import lightning_indexer_kl_loss
from ascend_attn_ops.ops.prompt_flash_attention import prompt_flash_attention
from ascend_attn_ops.ops.quant_lightning_indexer import quant_lightning_indexer
from ascend_attn_ops.ops.scatter_pa_kv_cache import scatter_pa_kv_cache_
from ascend_attn_ops.ops.sparse_flash_attention import sparse_flash_attention
from ascend_attn_ops.ops.sparse_flash_attention_grad import sparse_flash_attention_grad
from ascend_attn_ops.ops.sparse_flash_mla import sparse_flash_mla
from ascend_attn_ops.ops.sparse_flash_mla_grad import sparse_flash_mla_grad
from ascend_attn_ops.ops.sparse_lightning_indexer_grad_kl_loss import (
    sparse_lightning_indexer_grad_kl_loss,
)
from ascend_attn_ops.ops.sparse_lightning_indexer_kl_loss_grad import (
    sparse_lightning_indexer_kl_loss_grad,
)

__all__ = [
    "attention_update",
    "flash_attention_score",
    "flash_attention_score_grad",
    "fused_infer_attention_score",
    "kv_quant_sparse_flash_attention",
    "lightning_indexer",
    "lightning_indexer_grad",
    "lightning_indexer_kl_loss",
    "prompt_flash_attention",
    "quant_lightning_indexer",
    "scatter_pa_kv_cache_",
    "sparse_flash_attention",
    "sparse_flash_attention_grad",
    "sparse_flash_mla",
    "sparse_flash_mla_grad",
    "sparse_lightning_indexer_grad_kl_loss",
    "sparse_lightning_indexer_kl_loss_grad",
]
