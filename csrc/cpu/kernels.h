// The CPU kernels: each fills all of the outputs that check_and_allocate has made.
#pragma once

#include "ops/lightning_indexer.h"
#include "ops/lightning_indexer_kl_loss.h"

namespace ascend_attn::cpu {

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs);
void lightning_indexer_grad(const LightningIndexerGrad& op, LightningIndexerGrad::Outputs& outputs);
void sparse_lightning_indexer_grad_kl_loss(const SparseLightningIndexerGradKLLoss& op,
                                           SparseLightningIndexerGradKLLoss::Outputs& outputs);

}  // namespace ascend_attn::cpu
