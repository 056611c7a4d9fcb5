// The list of operators. Each entry gets a schema, fake tensor support, a fast path from Python,
// and a row in the table of limits.
#pragma once

#include "dispatch/operator.h"
#include "ops/attention_update.h"
#include "ops/flash_attention_score.h"
#include "ops/fused_infer_attention_score.h"
#include "ops/kv_quant_sparse_flash_attention.h"
#include "ops/lightning_indexer.h"
#include "ops/prompt_flash_attention.h"
#include "ops/quant_lightning_indexer.h"
#include "ops/scatter_pa_kv_cache.h"
#include "ops/sparse_flash_attention.h"
#include "ops/sparse_flash_mla.h"
#include "ops/sparse_lightning_indexer_grad_kl_loss.h"
#include "ops/sparse_lightning_indexer_kl_loss_grad.h"

namespace ascend_attn {

template <typename... Ops>
struct OperatorList {
  // Calls visit.operator()<Op>() with each of them.
  template <typename Visitor>
  static void for_each(const Visitor& visit) {
    (visit.template operator()<Ops>(), ...);
  }
};

using Operators =
    OperatorList<LightningIndexer, LightningIndexerGrad, QuantLightningIndexer,
                 SparseFlashAttention, SparseFlashAttentionGrad, KvQuantSparseFlashAttention,
                 SparseFlashMla, SparseFlashMlaGrad, SparseLightningIndexerGradKLLoss,
                 SparseLightningIndexerKLLossGrad, FlashAttentionScore, FlashAttentionScoreGrad,
                 ScatterPaKvCache, PromptFlashAttention, FusedInferAttentionScore, AttentionUpdate>;

// Operators that only autograd calls.
using PrivateOperators = OperatorList<FlashAttentionScoreExtendedGrad, AttentionUpdateGrad>;

}  // namespace ascend_attn
