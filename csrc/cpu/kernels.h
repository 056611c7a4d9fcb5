// The CPU kernel of every operator. The arguments are checked and the outputs allocated, but not
// initialised; a kernel checks the values of sparse_indices and lengths, which only it can read.
#pragma once

#include "ops/operators.h"

namespace ascend_attn::cpu {

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs);
void lightning_indexer_grad(const LightningIndexerGrad& op, LightningIndexerGrad::Outputs& outputs);
void sparse_flash_attention(const SparseFlashAttention& op, SparseFlashAttention::Outputs& outputs);
void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs);
void sparse_lightning_indexer_grad_kl_loss(const SparseLightningIndexerGradKLLoss& op,
                                           SparseLightningIndexerGradKLLoss::Outputs& outputs);
void flash_attention_score(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs);
void flash_attention_score_grad(const FlashAttentionScoreGrad& op,
                                FlashAttentionScoreGrad::Outputs& outputs);
void flash_attention_pse_grad(const FlashAttentionPseGrad& op,
                              FlashAttentionPseGrad::Outputs& outputs);
void prompt_flash_attention(const PromptFlashAttention& op, PromptFlashAttention::Outputs& outputs);
void scatter_pa_kv_cache(const ScatterPaKvCache& op, ScatterPaKvCache::Outputs&);

}  // namespace ascend_attn::cpu
