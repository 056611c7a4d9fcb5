#include "ops/prompt_flash_attention.h"

#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

struct PromptFlashAttentionFunction : FunctionOf<PromptFlashAttention> {
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor pse_shift, Tensor atten_mask,
                        IntArray actual_seq_lengths, IntArray actual_seq_lengths_kv,
                        Tensor deq_scale1, Tensor quant_scale1, Tensor deq_scale2,
                        Tensor quant_scale2, Tensor quant_offset2, int64_t num_heads,
                        double scale_value, int64_t pre_tokens, int64_t next_tokens,
                        Text input_layout, int64_t num_key_value_heads, int64_t sparse_mode,
                        Tensor attention_out);
};

void prompt_flash_attention(const PromptFlashAttention& op,
                            PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  // The function does not support strided tensors.
  const auto dense = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(tensor->contiguous()) : std::nullopt;
  };
  launch<PromptFlashAttentionFunction>(
      op.query.contiguous(), op.key.contiguous(), op.value.contiguous(), std::nullopt,
      dense(op.atten_mask), list_or_empty(op.actual_seq_lengths_query),
      list_or_empty(op.actual_seq_lengths_key), dense(op.deq_scale1), dense(op.quant_scale1),
      dense(op.deq_scale2), dense(op.quant_scale2), dense(op.quant_offset2),
      op.num_heads.expect_int(), op.scale_value, op.pre_tokens, op.next_tokens, op.layout.text(),
      op.num_key_value_heads.expect_int(), op.sparse_mode, std::get<0>(outputs));
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<PromptFlashAttention, prompt_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
