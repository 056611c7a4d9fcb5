#include "ops/kv_quant_sparse_flash_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include "npu/aclnn/product.h"
#include "npu/kernel.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

using KvQuantPrototype = int(AclTensor query, AclTensor key, AclTensor value,
                             AclTensor sparse_indices, AclTensor key_dequant_scale,
                             AclTensor value_dequant_scale, AclTensor block_table,
                             AclTensor actual_seq_lengths_query, AclTensor actual_seq_lengths_kv,
                             double scale_value, int64_t key_quant_mode, int64_t value_quant_mode,
                             int64_t sparse_block_size, char* layout_query, char* layout_kv,
                             int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,
                             int64_t attention_mode, int64_t quant_scale_repo_mode,
                             int64_t tile_size, int64_t rope_head_dim, AclTensor attention_out);
constexpr Launcher<KvQuantSparseFlashAttention, KvQuantPrototype> aclnn_kv_quant_attention;

// The kernel never reads value, which may be any tensor: it gets key.
void launch_kv_quant(const KvQuantSparseFlashAttention& op, const at::Tensor& out) {
  constexpr int64_t kAbsorbed = 2;
  constexpr int64_t kScalesInRows = 1;
  Fills fills;
  if (op.layout == Layout::TND) {
    add_fill(fills, out, 0);
  }
  aclnn_kv_quant_attention.with(fills)(
      op.query, op.key, op.key, with_head_axis(op.sparse_indices, op.query), std::nullopt,
      std::nullopt, op.pages.block_table, op.actual_seq_lengths_query, op.actual_seq_lengths_key,
      op.scale_value, op.key_quant_mode, op.value_quant_mode, op.sparse_block_size,
      op.layout.text(), op.pages.layout(op.layout), op.sparse_mode, op.pre_tokens, op.next_tokens,
      kAbsorbed, kScalesInRows, op.tile_size, op.rope_head_dim, out);
}

// Before CANN 9.1 the kernel writes out of bounds where it sets rows behind a length of BSND to
// zero. In a pack, the rows and the keys behind the lengths of a batch are two sequences more,
// without keys and without queries, and no length is read on the host.
KvQuantSparseFlashAttention pack_of_batch(const KvQuantSparseFlashAttention& op) {
  const auto in_turn = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return at::stack({a, b, c}, 1).flatten(0, 1);
  };
  const auto queries = op.query.size(1);
  const auto& of_queries = *op.actual_seq_lengths_query;
  const auto none = at::zeros_like(of_queries);
  auto pack = op;
  pack.layout = LayoutArgument("TND");
  pack.query = op.query.flatten(0, 1);
  pack.sparse_indices = with_head_axis(op.sparse_indices, op.query).flatten(0, 1);
  pack.actual_seq_lengths_query =
      in_turn(of_queries, queries - of_queries, none).cumsum(0, at::kInt);
  if (op.pages.given()) {
    const auto& table = *op.pages.block_table;
    pack.actual_seq_lengths_key = in_turn(*op.actual_seq_lengths_key, none, none);
    pack.pages.block_table = in_turn(table, table, table);
  } else {
    const auto keys = op.key.size(1);
    const auto of_keys = op.actual_seq_lengths_key ? at::Tensor(*op.actual_seq_lengths_key)
                                                   : at::full_like(of_queries, keys);
    pack.actual_seq_lengths_key = in_turn(of_keys, none, keys - of_keys).cumsum(0, at::kInt);
    pack.key = op.key.flatten(0, 1);
  }
  return pack;
}

void kv_quant_sparse_flash_attention(const KvQuantSparseFlashAttention& op,
                                     KvQuantSparseFlashAttention::Outputs& outputs) {
  const auto& out = std::get<0>(outputs);
  static const bool overruns = runs_on(kA2A3.before(Cann::v9_1));
  if (overruns && op.layout == Layout::BSND && op.actual_seq_lengths_query) {
    launch_kv_quant(pack_of_batch(op), out.flatten(0, 1));
  } else {
    launch_kv_quant(op, out);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<KvQuantSparseFlashAttention, kv_quant_sparse_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
