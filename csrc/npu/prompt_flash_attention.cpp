#include "ops/prompt_flash_attention.h"

#include "npu/aclnn/product.h"
#include "npu/fused_infer.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

constexpr const char* kPrompt = PromptFlashAttention::name;

using PromptPrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor pse_shift,
                            AclTensor atten_mask, AclIntArray actual_seq_lengths,
                            AclIntArray actual_seq_lengths_kv, AclTensor deq_scale1,
                            AclTensor quant_scale1, AclTensor deq_scale2, AclTensor quant_scale2,
                            AclTensor quant_offset2, int64_t num_heads, double scale_value,
                            int64_t pre_tokens, int64_t next_tokens, char* input_layout,
                            int64_t num_key_value_heads, int64_t sparse_mode, int64_t inner_precise,
                            AclTensor attention_out);
constexpr Launcher<PromptFlashAttention, PromptPrototype, 0> aclnn_prompt_flash_attention_v3;
constexpr auto aclnn_fused_infer_of_prompts =
    launch_fused_infer<PromptFlashAttention, FusedInferV5, 1>;

// Returns a scale of an output with one axis. V5 takes none in float16.
std::optional<at::Tensor> scale_of_v5(const std::optional<at::Tensor>& scale) {
  if (!scale) {
    return std::nullopt;
  }
  const bool is_half = scale->scalar_type() == at::kHalf;
  check_implemented(!is_half || !GivenWorkspace::current(), kPrompt, "quant_scale2, quant_offset2",
                    "expected dtype float32, in a call whose lengths a graph updates, got float16");
  const auto dense_scale = dense(kPrompt, *scale).view(-1);
  return is_half ? dense_scale.to(at::kFloat) : dense_scale;
}

void launch_v5(const PromptFlashAttention& op, const at::Tensor& out) {
  const auto axes = axes_of(op.layout.value());
  const auto query = dense(kPrompt, op.query);
  const auto key = dense(kPrompt, op.key);
  const auto value = dense(kPrompt, op.value);
  const int64_t batches = query.size(axes.batch);
  const int64_t queries = query.size(axes.tokens);
  FusedInfer call{
      .query = query,
      .key = key,
      .value = value,
      .atten_mask = launched_mask(kPrompt, mask_of(op), op.sparse_mode,
                                  /*rows_are_batches=*/false),
      .query_lengths = lengths_per_batch(op.actual_seq_lengths_query, batches, queries),
      .key_lengths = lengths_per_batch(op.actual_seq_lengths_key, batches, key.size(axes.tokens)),
      .quant_scale2 = scale_of_v5(op.quant_scale2),
      .quant_offset2 = scale_of_v5(op.quant_offset2),
      .num_heads = op.heads().expect_int(),
      .scale_value = op.scale(),
      .pre_tokens = op.pre_tokens,
      .next_tokens = op.next_tokens,
      .layout = op.layout.text(),
      .num_key_value_heads = op.num_key_value_heads.expect_int(),
      .sparse_mode = op.sparse_mode,
      .inner_precise = kCorrectsMaskedRows,
      .out = out};
  if (queries == 1 && key.numel() != 0) {
    keep_by_lengths(kPrompt, call, key.size(axes.tokens));
  }
  aclnn_fused_infer_of_prompts(call);
}

void prompt_flash_attention(const PromptFlashAttention& op,
                            PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  const auto& out = std::get<0>(outputs);
  static const bool lacks_v3 = runs_on(k950);
  if (lacks_v3) {
    launch_v5(op, out);
    return;
  }
  aclnn_prompt_flash_attention_v3(
      dense(kPrompt, op.query), dense(kPrompt, op.key), dense(kPrompt, op.value), std::nullopt,
      dense(kPrompt, mask_of(op)), op.actual_seq_lengths_query, op.actual_seq_lengths_key,
      dense(kPrompt, op.deq_scale1), dense(kPrompt, op.quant_scale1), dense(kPrompt, op.deq_scale2),
      dense(kPrompt, op.quant_scale2), dense(kPrompt, op.quant_offset2), op.heads().expect_int(),
      op.scale(), op.pre_tokens, op.next_tokens, op.layout.text(),
      op.num_key_value_heads.expect_int(), op.sparse_mode, kCorrectsMaskedRows, out);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel_and_relaunch<PromptFlashAttention, prompt_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
