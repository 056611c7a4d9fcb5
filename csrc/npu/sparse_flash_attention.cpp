#include "ops/sparse_flash_attention.h"

#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

struct SparseFlashAttentionFunction : FunctionOf<SparseFlashAttention> {
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,
                        Tensor block_table, Tensor actual_seq_lengths_query,
                        Tensor actual_seq_lengths_kv, Tensor query_rope, Tensor key_rope,
                        double scale_value, int64_t sparse_block_size, Text layout_query,
                        Text layout_kv, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, int64_t attention_mode, bool return_softmax_lse,
                        Tensor attention_out, Tensor softmax_max, Tensor softmax_sum);
};

void sparse_flash_attention(const SparseFlashAttention& op,
                            SparseFlashAttention::Outputs& outputs) {
  check_value_is_key(op);
  constexpr int64_t kAbsorbed = 2;
  constexpr bool kReturnSoftmaxLse = true;
  const auto& [out, softmax_max, softmax_sum] = outputs;
  if (op.options.layout == Layout::TND) {
    fill_before_launch(out, 0);
    fill_before_launch(softmax_max, 0);
    fill_before_launch(softmax_sum, 0);
  }
  launch<SparseFlashAttentionFunction>(
      op.query, op.key, op.value, op.sparse_indices, std::nullopt,
      op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key, op.options.query_rope,
      op.options.key_rope, op.options.scale_value, op.options.sparse_block_size,
      op.options.layout.text(), op.options.layout.text(), op.options.sparse_mode,
      op.options.pre_tokens, op.options.next_tokens, kAbsorbed, kReturnSoftmaxLse, out, softmax_max,
      softmax_sum);
}

struct SparseFlashAttentionGradFunction : FunctionOf<SparseFlashAttentionGrad> {
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, Tensor d_out,
                        Tensor out, Tensor softmax_max, Tensor softmax_sum,
                        Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_kv,
                        Tensor query_rope, Tensor key_rope, double scale_value,
                        int64_t sparse_block_size, Text layout, int64_t sparse_mode,
                        int64_t pre_tokens, int64_t next_tokens, bool deterministic, Tensor d_query,
                        Tensor d_key, Tensor d_value, Tensor d_query_rope, Tensor d_key_rope);
};

void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs) {
  check_value_is_key(op);
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  launch<SparseFlashAttentionGradFunction>(
      op.query, op.key, op.value, op.sparse_indices, op.d_out, op.out, op.softmax_max,
      op.softmax_sum, op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key,
      op.options.query_rope, op.options.key_rope, op.options.scale_value,
      op.options.sparse_block_size, op.options.layout.text(), op.options.sparse_mode,
      op.options.pre_tokens, op.options.next_tokens,
      DeterministicContext{is_deterministic(op.options.deterministic)}, d_query, d_key, d_value,
      d_query_rope, d_key_rope);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<SparseFlashAttention, sparse_flash_attention>(m);
  register_kernel<SparseFlashAttentionGrad, sparse_flash_attention_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
