#include "ops/prompt_flash_attention.h"

#include "npu/aclnn/library.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

template <typename... InnerPrecise>
using PromptPrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor pse_shift,
                            AclTensor atten_mask, AclIntArray actual_seq_lengths,
                            AclIntArray actual_seq_lengths_kv, AclTensor deq_scale1,
                            AclTensor quant_scale1, AclTensor deq_scale2, AclTensor quant_scale2,
                            AclTensor quant_offset2, int64_t num_heads, double scale_value,
                            int64_t pre_tokens, int64_t next_tokens, char* input_layout,
                            int64_t num_key_value_heads, int64_t sparse_mode,
                            InnerPrecise... inner_precise, AclTensor attention_out);

constexpr Launcher<PromptFlashAttention, PromptPrototype<int64_t>, 0> aclnn_v3;
constexpr Launcher<PromptFlashAttention, PromptPrototype<>, 1> aclnn_v2;

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
             dense(op.atten_mask), op.actual_seq_lengths_query, op.actual_seq_lengths_key,
             dense(op.deq_scale1), dense(op.quant_scale1), dense(op.deq_scale2),
             dense(op.quant_scale2), dense(op.quant_offset2), op.num_heads.expect_int(),
             op.scale_value, op.pre_tokens, op.next_tokens, op.layout.text(),
             op.num_key_value_heads.expect_int(), op.sparse_mode, inner_precise...,
             std::get<0>(outputs));
  };
  static const bool has_v3 = has_function(aclnn_v3.name);
  if (has_v3) {
    // A float32 softmax, and zeros in rows that the mask's content masks whole.
    constexpr int64_t kAsOnTheCpu = 2;
    call(aclnn_v3, kAsOnTheCpu);
  } else {
    // Its softmax of float16 inputs is in float16, and such a row is the mean of the values.
    call(aclnn_v2);
  }
}

const Registration npu(c10::DispatchKey::PrivateUse1, [](torch::Library& m) {
  register_kernel_and_relaunch<PromptFlashAttention, prompt_flash_attention>(m);
});

}  // namespace
}  // namespace ascend_attn::aclnn
