#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

struct SparseLightningIndexerGradKLLossFunction : FunctionOf<SparseLightningIndexerGradKLLoss> {
  using Prototype = int(Tensor query, Tensor key, Tensor query_index, Tensor key_index,
                        Tensor weights, Tensor sparse_indices, Tensor softmax_max,
                        Tensor softmax_sum, Tensor query_rope, Tensor key_rope,
                        IntArray actual_seq_lengths_query, IntArray actual_seq_lengths_key,
                        double scale_value, Text layout, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, bool deterministic, Tensor d_query_index,
                        Tensor d_key_index, Tensor d_weights, Tensor loss);
};

void sparse_lightning_indexer_grad_kl_loss(const SparseLightningIndexerGradKLLoss& op,
                                           SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  const auto& [d_query_index, d_key_index, d_weights, loss] = outputs;
  launch<SparseLightningIndexerGradKLLossFunction>(
      op.query, op.key, op.query_index, op.key_index, op.weights, op.sparse_indices, op.softmax_max,
      op.softmax_sum, op.query_rope, op.key_rope, list_or_empty(op.actual_seq_lengths_query),
      list_or_empty(op.actual_seq_lengths_key), op.scale_value, op.layout.text(), op.sparse_mode,
      op.pre_tokens, op.next_tokens, DeterministicContext{is_deterministic(op.deterministic)},
      d_query_index, d_key_index, d_weights, loss);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<SparseLightningIndexerGradKLLoss, sparse_lightning_indexer_grad_kl_loss>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
