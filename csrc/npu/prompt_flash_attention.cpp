#include "ops/prompt_flash_attention.h"

#include "npu/aclnn/library.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

template <typename... InnerPrecise>
using PromptPrototype = int(Tensor query, Tensor key, Tensor value, Tensor pse_shift,
                            Tensor atten_mask, IntArray actual_seq_lengths,
                            IntArray actual_seq_lengths_kv, Tensor deq_scale1, Tensor quant_scale1,
                            Tensor deq_scale2, Tensor quant_scale2, Tensor quant_offset2,
                            int64_t num_heads, double scale_value, int64_t pre_tokens,
                            int64_t next_tokens, Text input_layout, int64_t num_key_value_heads,
                            int64_t sparse_mode, InnerPrecise... inner_precise,
                            Tensor attention_out);

struct PromptFlashAttentionV3 : FunctionOf<PromptFlashAttention, 0> {
  using Prototype = PromptPrototype<int64_t>;
};
struct PromptFlashAttentionV2 : FunctionOf<PromptFlashAttention, 1> {
  using Prototype = PromptPrototype<>;
};

void prompt_flash_attention(const PromptFlashAttention& op,
                            PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  // The functions do not support strided tensors. A call that a graph launches again has none:
  // their copies would be gone when it is replayed.
  const auto dense_one = [](const at::Tensor& tensor) {
    check_implemented(tensor.is_contiguous() || !GivenWorkspace::current(),
                      PromptFlashAttention::name, "query, key, value, atten_mask and scales",
                      "expected contiguous tensors, in a call whose lengths a graph updates, got "
                      "strides ",
                      tensor.strides());
    return tensor.contiguous();
  };
  const auto dense = [&](const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(dense_one(*tensor)) : std::nullopt;
  };
  const auto call = [&](const auto& function, auto... inner_precise) {
    function(dense_one(op.query), dense_one(op.key), dense_one(op.value), std::nullopt,
             dense(op.atten_mask), list_or_empty(op.actual_seq_lengths_query),
             list_or_empty(op.actual_seq_lengths_key), dense(op.deq_scale1), dense(op.quant_scale1),
             dense(op.deq_scale2), dense(op.quant_scale2), dense(op.quant_offset2),
             op.num_heads.expect_int(), op.scale_value, op.pre_tokens, op.next_tokens,
             op.layout.text(), op.num_key_value_heads.expect_int(), op.sparse_mode,
             inner_precise..., std::get<0>(outputs));
  };
  static const bool has_v3 = has_function(PromptFlashAttentionV3::name);
  if (has_v3) {
    // A float32 softmax, and zeros in rows that the mask's content masks whole.
    constexpr int64_t kAsOnTheCpu = 2;
    call(launch<PromptFlashAttentionV3>, kAsOnTheCpu);
  } else {
    // Its softmax of float16 inputs is in float16, and such a row is the mean of the values.
    call(launch<PromptFlashAttentionV2>);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel_with_outputs<PromptFlashAttention, prompt_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
