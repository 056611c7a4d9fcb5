#include <torch/library.h>

#include "cpu/kernels.h"
#include "ops/operator.h"

namespace ascend_attn {

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<LightningIndexer, cpu::lightning_indexer>(m);
  register_kernel<LightningIndexerGrad, cpu::lightning_indexer_grad>(m);
  register_kernel<SparseFlashAttention, cpu::sparse_flash_attention>(m);
  register_kernel<SparseFlashAttentionGrad, cpu::sparse_flash_attention_grad>(m);
  register_kernel<SparseLightningIndexerGradKLLoss, cpu::sparse_lightning_indexer_grad_kl_loss>(m);
}

}  // namespace ascend_attn
