// Fake tensors need the checks and the outputs, and nothing else.
#include "ops/flash_attention.h"
#include "ops/lightning_indexer.h"
#include "ops/lightning_indexer_kl_loss.h"
#include "ops/operator.h"
#include "ops/prompt_flash_attention.h"
#include "ops/scatter_pa_kv_cache.h"
#include "ops/sparse_flash_attention.h"

namespace ascend_attn {
namespace {

template <typename Op>
void no_values(const Op&, typename Op::Outputs&) {}

template <typename... Ops>
void register_meta(torch::Library& library) {
  (register_kernel<Ops, no_values<Ops>>(library), ...);
}

TORCH_LIBRARY_IMPL(ascend, Meta, m) {
  register_meta<LightningIndexer, LightningIndexerGrad, SparseFlashAttention,
                SparseFlashAttentionGrad, SparseLightningIndexerGradKLLoss, FlashAttentionScore,
                FlashAttentionScoreGrad, FlashAttentionPseGrad, PromptFlashAttention,
                ScatterPaKvCache>(m);
}

}  // namespace
}  // namespace ascend_attn
