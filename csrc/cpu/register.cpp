#include <torch/library.h>

#include "cpu/kernels.h"

namespace ascend_attn {

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<LightningIndexer, cpu::lightning_indexer>(m);
  register_kernel<LightningIndexerGrad, cpu::lightning_indexer_grad>(m);
  register_kernel<SparseFlashAttention, cpu::sparse_flash_attention>(m);
  register_kernel<SparseFlashAttentionGrad, cpu::sparse_flash_attention_grad>(m);
  register_kernel<SparseLightningIndexerGradKLLoss, cpu::sparse_lightning_indexer_grad_kl_loss>(m);
  register_kernel<FlashAttentionScore, cpu::flash_attention_score>(m);
  register_kernel<FlashAttentionScoreGrad, cpu::flash_attention_score_grad>(m);
  register_kernel<FlashAttentionPseGrad, cpu::flash_attention_pse_grad>(m);
  register_kernel<PromptFlashAttention, cpu::prompt_flash_attention>(m);
  register_kernel<ScatterPaKvCache, cpu::scatter_pa_kv_cache>(m);
}

}  // namespace ascend_attn
