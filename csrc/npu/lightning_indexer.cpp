#include "ops/lightning_indexer.h"

#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

struct LightningIndexerFunction : FunctionOf<LightningIndexer> {
  using Prototype = int(Tensor query, Tensor key, Tensor weights, Tensor actual_seq_lengths_query,
                        Tensor actual_seq_lengths_key, Tensor block_table, Text layout_query,
                        Text layout_key, int64_t sparse_count, int64_t sparse_mode,
                        int64_t pre_tokens, int64_t next_tokens, bool return_values,
                        Tensor sparse_indices, Tensor sparse_values);
};

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  const auto& [sparse_indices, sparse_values] = outputs;
  launch<LightningIndexerFunction>(op.query, op.key, op.weights, op.actual_seq_lengths_query,
                                   op.actual_seq_lengths_key, std::nullopt, op.layout.text(),
                                   op.layout.text(), op.sparse_count.expect_int(), op.sparse_mode,
                                   op.pre_tokens, op.next_tokens, op.return_values, sparse_indices,
                                   sparse_values);
}

struct LightningIndexerGradFunction : FunctionOf<LightningIndexerGrad> {
  using Prototype = int(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, Tensor weights,
                        Tensor actual_seq_q_len, Tensor actual_seq_kv_len, int64_t head_num,
                        Text input_layout, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, bool deterministic, Tensor dq, Tensor dk,
                        Tensor dweights);
};

void lightning_indexer_grad(const LightningIndexerGrad& op,
                            LightningIndexerGrad::Outputs& outputs) {
  const auto& [d_query, d_key, d_weights] = outputs;
  launch<LightningIndexerGradFunction>(
      op.query, op.key, op.d_values, op.sparse_indices, op.weights, op.actual_seq_lengths_query,
      op.actual_seq_lengths_key, op.query.size(-2), op.layout.text(), op.sparse_mode, op.pre_tokens,
      op.next_tokens, is_deterministic(op.deterministic), d_query, d_key, d_weights);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<LightningIndexer, lightning_indexer>(m);
  register_kernel<LightningIndexerGrad, lightning_indexer_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
