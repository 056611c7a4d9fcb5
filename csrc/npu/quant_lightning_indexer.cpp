#include "ops/quant_lightning_indexer.h"

#include "npu/kernel.h"
#include "npu/pack_without_pairs.h"

namespace ascend_attn::aclnn {
namespace {

using QuantLightningIndexerPrototype =
    int(AclTensor query, AclTensor key, AclTensor weights, AclTensor query_dequant_scale,
        AclTensor key_dequant_scale, AclTensor actual_seq_lengths_query,
        AclTensor actual_seq_lengths_key, AclTensor block_table, int64_t query_quant_mode,
        int64_t key_quant_mode, char* layout_query, char* layout_key, int64_t sparse_count,
        int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens, AclTensor sparse_indices);
constexpr Launcher<QuantLightningIndexer, QuantLightningIndexerPrototype>
    aclnn_quant_lightning_indexer;

void quant_lightning_indexer(const QuantLightningIndexer& op,
                             QuantLightningIndexer::Outputs& outputs) {
  const auto& [sparse_indices] = outputs;
  if (sparse_indices.numel() == 0 || op.key.size(0) == 0 || op.key.size(-3) == 0 ||
      lacks_pairs(op)) {
    fill_output(sparse_indices, -1);
    return;
  }
  Fills fills;
  if (op.layout == Layout::TND) {
    add_fill(fills, sparse_indices, -1);
  }
  // Releases after 9.1 read a pack of keys as if it were dense.
  const bool pack = op.layout == Layout::TND && !op.pages.given();
  const auto key = pack ? op.key.contiguous() : op.key;
  const auto key_scale = pack ? op.key_dequant_scale.contiguous() : op.key_dequant_scale;
  const auto launch = [&](const QuantLightningIndexer& call) {
    aclnn_quant_lightning_indexer.with(fills)(
        call.query, key, call.weights, call.query_dequant_scale, key_scale,
        call.actual_seq_lengths_query, call.actual_seq_lengths_key, call.pages.block_table,
        call.query_quant_mode, call.key_quant_mode, call.layout.text(),
        call.pages.layout(call.layout), call.sparse_count.expect_int(), call.sparse_mode,
        call.pre_tokens, call.next_tokens, sparse_indices);
  };
  if (may_lack_pairs(op)) {
    sparse_indices[0].masked_fill_(launch_with_a_pair(op, launch), -1);
  } else {
    launch(op);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<QuantLightningIndexer, quant_lightning_indexer>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
