#include "ops/lightning_indexer.h"

#include <limits>
#include <optional>

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
  FillsBeforeLaunch fills;
  if (op.layout == Layout::TND) {
    fills.add(sparse_indices, -1);
    fill_before_launch(sparse_values, -std::numeric_limits<double>::infinity());
  }
  launch<LightningIndexerFunction>.filling(fills.of_call())(
      op.query, op.key, op.weights, op.actual_seq_lengths_query, op.actual_seq_lengths_key,
      op.pages.block_table, op.layout.text(), op.pages.layout(op.layout),
      op.sparse_count.expect_int(), op.sparse_mode, op.pre_tokens, op.next_tokens, op.return_values,
      sparse_indices, sparse_values);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<LightningIndexer, lightning_indexer>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
