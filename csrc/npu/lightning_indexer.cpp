#include "ops/lightning_indexer.h"

#include <optional>
#include <string_view>

#include "npu/compressed_keys.h"
#include "npu/kernel.h"
#include "npu/pack_without_pairs.h"
#include "npu/packing.h"

namespace ascend_attn::aclnn {
namespace {

using LightningIndexerPrototype = int(AclTensor query, AclTensor key, AclTensor weights,
                                      AclTensor actual_seq_lengths_query,
                                      AclTensor actual_seq_lengths_key, AclTensor block_table,
                                      char* layout_query, char* layout_key, int64_t sparse_count,
                                      int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,
                                      bool return_values, AclTensor sparse_indices,
                                      AclTensor sparse_values);
constexpr Launcher<LightningIndexer, LightningIndexerPrototype> aclnn_lightning_indexer;

using CompressedPrototype = int(AclTensor query, AclTensor key, AclTensor weights,
                                AclTensor cu_seqlens_query, AclTensor cu_seqlens_key,
                                AclTensor seqused_query, AclTensor seqused_key,
                                AclTensor cmp_residual_key, AclTensor block_table,
                                AclTensor output_idx_offset, AclTensor metadata,
                                int64_t sparse_count, int64_t max_seqlen_query, char* layout_query,
                                char* layout_key, int64_t mask_mode, int64_t cmp_ratio,
                                int64_t return_values, AclTensor sparse_indices,
                                AclTensor sparse_values);
constexpr Launcher<LightningIndexer, CompressedPrototype, 1> aclnn_lightning_indexer_v2;

void launch(const LightningIndexer& op, const LightningIndexer::Outputs& outputs,
            const Fills& fills) {
  const auto& [sparse_indices, sparse_values] = outputs;
  aclnn_lightning_indexer.with(fills)(
      op.query, op.key, op.weights, op.actual_seq_lengths_query, op.actual_seq_lengths_key,
      op.pages.block_table, op.layout.text(), op.pages.layout(op.layout),
      op.sparse_count.expect_int(), op.sparse_mode, op.pre_tokens, op.next_tokens, op.return_values,
      sparse_indices, sparse_values);
}

// The function's own name of paged keys.
constexpr std::string_view kPagedV2 = "PA_BBND";
constexpr int64_t kAnyLength = -1;

// A2 and A3 need no metadata: the kernel divides the rows by itself.
void launch_compressed(const LightningIndexer& op, const LightningIndexer::Outputs& outputs,
                       const Fills& fills) {
  using Lengths = std::optional<at::Tensor>;
  const auto& [sparse_indices, sparse_values] = outputs;
  const auto& query_lengths = op.actual_seq_lengths_query;
  const auto& key_lengths = op.actual_seq_lengths_key;
  const bool packed = op.layout == Layout::TND;
  const bool cumulative_keys = packed && !op.pages.given();
  const Lengths cu_query = packed ? Lengths(cu_seqlens(*query_lengths)) : std::nullopt;
  const Lengths cu_key = cumulative_keys ? Lengths(cu_seqlens(*key_lengths)) : std::nullopt;
  const Lengths used_query = packed ? std::nullopt : query_lengths;
  const Lengths used_key = op.pages.given() ? key_lengths : std::nullopt;
  aclnn_lightning_indexer_v2.with(fills)(
      op.query, op.key, op.weights, cu_query, cu_key, used_query, used_key,
      residual_of(op, cumulative_keys), op.pages.block_table, std::nullopt, std::nullopt,
      op.sparse_count.expect_int(), kAnyLength, op.layout.text(),
      op.pages.given() ? kPagedV2 : op.layout.text(), op.sparse_mode, op.cmp_ratio,
      int64_t{op.return_values}, sparse_indices, sparse_values);
}

// The kernel reads no lengths of a padded batch beside contiguous keys.
void launch_compressed_padded(const LightningIndexer& op,
                              const LightningIndexer::Outputs& outputs) {
  const Packing packing(sequences_on_host(op.name, op.layout.value(), op.query, op.key,
                                          op.actual_seq_lengths_query, op.actual_seq_lengths_key),
                        op.query, op.key);
  const auto& [sparse_indices, sparse_values] = outputs;
  fill_output(sparse_indices, -1);
  fill_output(sparse_values, -kInfinity);
  const auto pack = [&](LightningIndexer& call) {
    packing.pack(kQueries, call.query, call.weights);
    packing.pack(kKeys, call.key);
    packing.pack_numbers(call.cmp_residual_key);
    packing.pack_lengths(call, op.query);
  };
  const auto launch = [](const LightningIndexer& call, const LightningIndexer::Outputs& results) {
    launch_compressed(call, results, {});
  };
  packing.launch(op, outputs, pack, launch, {kQueries, kQueries});
}

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  const auto& [sparse_indices, sparse_values] = outputs;
  if (sparse_indices.numel() == 0 || op.key.size(0) == 0 || op.key.size(-3) == 0 ||
      (!op.pages.given() && lacks_pairs(op))) {
    fill_output(sparse_indices, -1);
    fill_output(sparse_values, -kInfinity);
    return;
  }
  const bool has_lengths = op.actual_seq_lengths_query || op.actual_seq_lengths_key;
  if (op.compressed() && has_lengths && op.layout == Layout::BSND && !op.pages.given()) {
    launch_compressed_padded(op, outputs);
    return;
  }
  Fills fills;
  if (op.layout == Layout::TND || (op.compressed() && op.actual_seq_lengths_query)) {
    add_fill(fills, sparse_indices, -1);
    fill_output(sparse_values, -kInfinity);
  }
  if (op.compressed()) {
    launch_compressed(op, outputs, fills);
  } else if (may_lack_pairs(op)) {
    const auto no_pairs =
        launch_with_a_pair(op, [&](const auto& pack) { launch(pack, outputs, fills); });
    sparse_indices[0].masked_fill_(no_pairs, -1);
    if (op.return_values) {
      sparse_values[0].masked_fill_(no_pairs, -kInfinity);
    }
  } else {
    launch(op, outputs, fills);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<LightningIndexer, lightning_indexer>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
