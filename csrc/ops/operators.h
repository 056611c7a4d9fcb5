// Every operator that users call.
#pragma once

#include "ops/flash_attention.h"
#include "ops/lightning_indexer.h"
#include "ops/lightning_indexer_kl_loss.h"
#include "ops/operator.h"
#include "ops/prompt_flash_attention.h"
#include "ops/scatter_pa_kv_cache.h"
#include "ops/sparse_flash_attention.h"

namespace ascend_attn {

template <typename... Ops>
struct OperatorList {};

using Operators =
    OperatorList<LightningIndexer, LightningIndexerGrad, SparseFlashAttention,
                 SparseFlashAttentionGrad, SparseLightningIndexerGradKLLoss, FlashAttentionScore,
                 FlashAttentionScoreGrad, PromptFlashAttention, ScatterPaKvCache>;

}  // namespace ascend_attn
