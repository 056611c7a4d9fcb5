#include "ops/sparse_flash_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>

#include "core/memory.h"
#include "npu/absent_ropes.h"
#include "npu/call_of_statistics.h"
#include "npu/kernel.h"
#include "npu/packing.h"
#include "npu/paged_statistics.h"
#include "npu/selection.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

using SparseFlashAttentionPrototype =
    int(AclTensor query, AclTensor key, AclTensor value, AclTensor sparse_indices,
        AclTensor block_table, AclTensor actual_seq_lengths_query, AclTensor actual_seq_lengths_kv,
        AclTensor query_rope, AclTensor key_rope, double scale_value, int64_t sparse_block_size,
        char* layout_query, char* layout_kv, int64_t sparse_mode, int64_t pre_tokens,
        int64_t next_tokens, int64_t attention_mode, bool return_softmax_lse,
        AclTensor attention_out, AclTensor softmax_max, AclTensor softmax_sum);
constexpr Launcher<SparseFlashAttention, SparseFlashAttentionPrototype>
    aclnn_sparse_flash_attention;

// The kernel goes on behind a gap where it gathers keys one by one. Their indices are launched as
// they are: to look for gaps takes the host several times as long as the launch, and
// lightning_indexer leaves none.
void launch(const SparseFlashAttention& op, SparseFlashAttention::Outputs& outputs) {
  constexpr int64_t kAbsorbed = 2;
  const auto selection = with_head_axis(op.sparse_indices, op.query);
  const auto ropes = ropes_or_zeros(op.query, op.key, op.options.query_rope, op.options.key_rope);
  const auto& [out, softmax_max, softmax_sum] = outputs;
  Fills fills;
  if (op.options.layout == Layout::TND) {
    add_fill(fills, out, 0);
    add_fill(fills, softmax_max, 0);
    add_fill(fills, softmax_sum, 0);
  }
  aclnn_sparse_flash_attention.with(fills)(
      op.query, op.key, op.value, selection, op.pages.block_table,
      op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key, ropes.query,
      ropes.key, op.options.scale_value, op.options.sparse_block_size, op.options.layout.text(),
      op.pages.layout(op.options.layout), op.options.sparse_mode, op.options.pre_tokens,
      op.options.next_tokens, kAbsorbed, op.return_softmax_lse, out, softmax_max, softmax_sum);
  if (op.options.sparse_block_size > 1 && selection.numel() != 0) {
    // Where it gathers whole blocks, it gives rows that select nothing an output of inf.
    out.masked_fill_(selection.narrow(-1, 0, 1) < 0, 0);
  }
}

void sparse_flash_attention(const SparseFlashAttention& op,
                            SparseFlashAttention::Outputs& outputs) {
  if (op.pages.given() && op.return_softmax_lse) {
    attend_to_gathered_keys(op, outputs, launch);
  } else {
    launch(op, outputs);
  }
}

using SparseFlashAttentionGradPrototype = int(
    AclTensor query, AclTensor key, AclTensor value, AclTensor sparse_indices, AclTensor d_out,
    AclTensor out, AclTensor softmax_max, AclTensor softmax_sum, AclTensor actual_seq_lengths_query,
    AclTensor actual_seq_lengths_kv, AclTensor query_rope, AclTensor key_rope, double scale_value,
    int64_t sparse_block_size, char* layout, int64_t sparse_mode, int64_t pre_tokens,
    int64_t next_tokens, bool deterministic, AclTensor d_query, AclTensor d_key, AclTensor d_value,
    AclTensor d_query_rope, AclTensor d_key_rope);
constexpr Launcher<SparseFlashAttentionGrad, SparseFlashAttentionGradPrototype>
    aclnn_sparse_flash_attention_grad;

void launch_grad(const SparseFlashAttentionGrad& op,
                 const SparseFlashAttentionGrad::Outputs& outputs) {
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  auto selection = with_head_axis(op.sparse_indices, op.query);
  if (op.options.sparse_block_size > 1) {
    selection = with_cut_block_last(selection, op.query, op.key, op.options);
  }
  const bool deterministic = is_deterministic(op.options.deterministic);
  aclnn_sparse_flash_attention_grad.in_context(deterministic_if(deterministic))(
      op.query, op.key, op.value, selection, op.d_out, op.out, op.softmax_max, op.softmax_sum,
      op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key, op.options.query_rope,
      op.options.key_rope, op.options.scale_value, op.options.sparse_block_size,
      op.options.layout.text(), op.options.sparse_mode, op.options.pre_tokens,
      op.options.next_tokens, deterministic, d_query, d_key, d_value, d_query_rope, d_key_rope);
}

// The kernel ignores lengths in BSND.
void launch_padded_grad(const SparseFlashAttentionGrad& op,
                        const SparseFlashAttentionGrad::Outputs& outputs) {
  const auto& options = op.options;
  const Packing packing(
      sequences_on_host(op.name, Layout::BSND, op.query, op.key, options.actual_seq_lengths_query,
                        options.actual_seq_lengths_key),
      op.query, op.key);
  auto packed = op;
  if (packing.complete()) {
    packed.options.actual_seq_lengths_query.reset();
    packed.options.actual_seq_lengths_key.reset();
    launch_grad(packed, outputs);
    return;
  }
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  for (const auto& output : {d_query, d_key, d_value, d_query_rope, d_key_rope}) {
    fill_output(output, 0);
  }
  if (packing.empty()) {
    return;
  }
  const auto queries = [&](const at::Tensor& tensor) { return packing.queries(tensor); };
  const auto statistics = [&](const at::Tensor& tensor) {
    return packing.queries(tensor.squeeze(1)).unsqueeze(0);
  };
  packed.query = queries(op.query);
  packed.key = packing.keys(op.key);
  packed.value = same_elements(op.value, op.key) ? packed.key : packing.keys(op.value);
  packed.sparse_indices = queries(with_head_axis(op.sparse_indices, op.query));
  packed.d_out = queries(*op.d_out);
  packed.out = queries(op.out);
  packed.softmax_max = statistics(op.softmax_max);
  packed.softmax_sum = statistics(op.softmax_sum);
  if (options.query_rope) {
    packed.options.query_rope = queries(*options.query_rope);
    packed.options.key_rope = packing.keys(*options.key_rope);
  }
  packed.options.actual_seq_lengths_query = to_device(at::tensor(packing.query_ends()), op.query);
  packed.options.actual_seq_lengths_key = to_device(at::tensor(packing.key_ends()), op.query);
  packed.options.layout = LayoutArgument("TND");
  const auto gradients = packed.check_and_allocate();
  launch_grad(packed, gradients);
  packing.unpack_queries(std::get<0>(gradients), d_query);
  packing.unpack_keys(std::get<1>(gradients), d_key);
  packing.unpack_keys(std::get<2>(gradients), d_value);
  if (options.query_rope) {
    packing.unpack_queries(std::get<3>(gradients), d_query_rope);
    packing.unpack_keys(std::get<4>(gradients), d_key_rope);
  }
}

void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs);

// Computes the gradients of softmax_sum, and adds those of out, by another launch.
void add_gradients_of_statistics(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs) {
  auto of_out = op;
  of_out.d_softmax_sum.reset();
  const auto d_lse = op.d_softmax_sum->mul(op.softmax_sum);
  const auto of_statistics = call_of_statistics(of_out, "d_softmax_sum", d_lse);
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  if (!op.d_out) {
    sparse_flash_attention_grad(of_statistics, outputs);
    fill_output(d_value, 0);
    return;
  }
  sparse_flash_attention_grad(of_out, outputs);
  auto others = of_statistics.check_and_allocate();
  sparse_flash_attention_grad(of_statistics, others);
  d_query.add_(std::get<0>(others));
  d_key.add_(std::get<1>(others));
  d_query_rope.add_(std::get<3>(others));
  d_key_rope.add_(std::get<4>(others));
}

void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs) {
  if (op.d_softmax_sum) {
    add_gradients_of_statistics(op, outputs);
    return;
  }
  const bool has_lengths = op.options.actual_seq_lengths_query || op.options.actual_seq_lengths_key;
  if (op.options.layout == Layout::BSND && has_lengths) {
    launch_padded_grad(op, outputs);
  } else {
    launch_grad(op, outputs);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<SparseFlashAttention, sparse_flash_attention>(m);
  register_checked_kernel<SparseFlashAttentionGrad, sparse_flash_attention_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
