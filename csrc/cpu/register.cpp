#include "cpu/kernels.h"
#include "ops/operator.h"

namespace ascend_attn::cpu {
namespace {

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<LightningIndexer, lightning_indexer>(m);
  register_kernel<LightningIndexerGrad, lightning_indexer_grad>(m);
  register_kernel<SparseLightningIndexerGradKLLoss, sparse_lightning_indexer_grad_kl_loss>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
