"""Each operator in plain torch: the executable specification.

Slow, written from the specification alone, independently of the kernels, and without checks of the
arguments other than the range of `sparse_indices`. They compute in fp64 when the inputs are fp64
and in fp32 otherwise. The functions have the signatures of the operators.
"""

from .flash_attention_score import flash_attention_score, flash_attention_score_grad
from .lightning_indexer import lightning_indexer, lightning_indexer_grad
from .prompt_flash_attention import prompt_flash_attention
from .scatter_pa_kv_cache import scatter_pa_kv_cache_
from .sparse_flash_attention import sparse_flash_attention, sparse_flash_attention_grad
from .sparse_lightning_indexer_grad_kl_loss import sparse_lightning_indexer_grad_kl_loss

__all__ = [
    "flash_attention_score",
    "flash_attention_score_grad",
    "lightning_indexer",
    "lightning_indexer_grad",
    "prompt_flash_attention",
    "scatter_pa_kv_cache_",
    "sparse_flash_attention",
    "sparse_flash_attention_grad",
    "sparse_lightning_indexer_grad_kl_loss",
]
