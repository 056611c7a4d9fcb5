#include "ops/lightning_indexer.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "core/sequence_lengths.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

using Prototype = int(AclTensor query, AclTensor key, AclTensor weights,
                      AclTensor actual_seq_lengths_query, AclTensor actual_seq_lengths_key,
                      AclTensor block_table, char* layout_query, char* layout_key,
                      int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens,
                      int64_t next_tokens, bool return_values, AclTensor sparse_indices,
                      AclTensor sparse_values);
constexpr Launcher<LightningIndexer, Prototype> aclnn_lightning_indexer;

// A pack of several sequences without a query that has keys: the kernel writes behind its outputs.
void check_any_keys(const LightningIndexer& op) {
  if (op.layout != Layout::TND || op.actual_seq_lengths_query->numel() < 2) {
    return;
  }
  const auto sequences =
      op.pages.given()
          ? read_paged_sequences(op.name, Layout::TND, op.query, op.key, *op.pages.block_table,
                                 op.actual_seq_lengths_query, *op.actual_seq_lengths_key)
          : read_sequences(op.name, Layout::TND, op.query, op.key, op.actual_seq_lengths_query,
                           op.actual_seq_lengths_key);
  check_value(!std::ranges::all_of(sequences, &Sequence::empty), op.name, "actual_seq_lengths_key",
              "expected a sequence that has queries and keys, without which the NPU's kernel "
              "writes out of bounds, got none among ",
              sequences.size());
}

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  const auto& [sparse_indices, sparse_values] = outputs;
  Fills fills;
  if (op.layout == Layout::TND) {
    add_fill(fills, sparse_indices, -1);
    fill_output(sparse_values, -std::numeric_limits<double>::infinity());
  }
  aclnn_lightning_indexer.with(fills)(
      op.query, op.key, op.weights, op.actual_seq_lengths_query, op.actual_seq_lengths_key,
      op.pages.block_table, op.layout.text(), op.pages.layout(op.layout),
      op.sparse_count.expect_int(), op.sparse_mode, op.pre_tokens, op.next_tokens, op.return_values,
      sparse_indices, sparse_values);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<LightningIndexer, lightning_indexer, check_any_keys>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
