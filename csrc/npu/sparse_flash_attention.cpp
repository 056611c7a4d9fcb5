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
  if (packing.complete()) {
    auto whole = op;
    whole.options.actual_seq_lengths_query.reset();
    whole.options.actual_seq_lengths_key.reset();
    launch_grad(whole, outputs);
    return;
  }
  fill_outputs(outputs, 0);
  const auto pack = [&](SparseFlashAttentionGrad& call) {
    call.sparse_indices = with_head_axis(op.sparse_indices, op.query);
    packing.pack(kQueries, call.query, call.sparse_indices, call.d_out, call.out,
                 call.options.query_rope);
    packing.pack(kKeys, call.key, call.options.key_rope);
    // The device wants the value to be the key.
    if (same_elements(op.value, op.key)) {
      call.value = call.key;
    } else {
      packing.pack(kKeys, call.value);
    }
    packing.pack_statistics(call.softmax_max, call.softmax_sum);
    packing.pack_lengths(call.options, op.query);
  };
  packing.launch(op, outputs, pack, launch_grad, {kQueries, kKeys, kKeys, kQueries, kKeys});
}

void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs) {
  if (op.d_softmax_sum) {
    auto of_out = op;
    of_out.d_softmax_sum.reset();
    const auto d_lse = op.d_softmax_sum->mul(op.softmax_sum);
    add_gradients_of_statistics<0, 1, 3, 4>(op.d_out.has_value(), of_out,
                                            call_of_statistics(of_out, "d_softmax_sum", d_lse),
                                            outputs, sparse_flash_attention_grad);
    if (!op.d_out) {
      fill_output(std::get<2>(outputs), 0);
    }
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
