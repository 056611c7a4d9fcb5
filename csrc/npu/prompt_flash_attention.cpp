#include "ops/prompt_flash_attention.h"

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "npu/aclnn/product.h"
#include "npu/fused_infer.h"
#include "npu/kernel.h"
#include "ops/prompt_flash_attention_rules.h"

namespace ascend_attn::aclnn {
namespace {

using PromptPrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor pse_shift,
                            AclTensor atten_mask, AclIntArray actual_seq_lengths,
                            AclIntArray actual_seq_lengths_kv, AclTensor deq_scale1,
                            AclTensor quant_scale1, AclTensor deq_scale2, AclTensor quant_scale2,
                            AclTensor quant_offset2, int64_t num_heads, double scale_value,
                            int64_t pre_tokens, int64_t next_tokens, char* input_layout,
                            int64_t num_key_value_heads, int64_t sparse_mode, int64_t inner_precise,
                            AclTensor attention_out);
constexpr Launcher<PromptFlashAttention, PromptPrototype, 0> aclnn_prompt_flash_attention_v3;
constexpr auto aclnn_fused_infer_attention_score_v5 = launch<PromptFlashAttention, FusedInferV5, 1>;

// A float32 softmax, and zeros in rows that the mask's content masks whole, as on the CPU.
constexpr int64_t kInnerPrecise = 2;

// Returns a tensor without gaps, which the functions require. A call that a graph launches again
// has no other: a copy would be gone when the graph is replayed.
at::Tensor dense(const at::Tensor& tensor) {
  check_implemented(tensor.is_contiguous() || !GivenWorkspace::current(),
                    PromptFlashAttention::name, "query, key, value, atten_mask and scales",
                    "expected contiguous tensors, in a call whose lengths a graph updates, got "
                    "strides ",
                    tensor.strides());
  return tensor.contiguous();
}
std::optional<at::Tensor> dense(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(dense(*tensor)) : std::nullopt;
}

// Returns a scale of an output with one axis. V5 takes none in float16.
std::optional<at::Tensor> scale_of_v5(const std::optional<at::Tensor>& scale) {
  if (!scale) {
    return std::nullopt;
  }
  const bool is_half = scale->scalar_type() == at::kHalf;
  check_implemented(!is_half || !GivenWorkspace::current(), PromptFlashAttention::name,
                    "quant_scale2, quant_offset2",
                    "expected dtype float32, in a call whose lengths a graph updates, got float16");
  const auto dense_scale = dense(*scale).view(-1);
  return is_half ? dense_scale.to(at::kFloat) : dense_scale;
}

// Returns one length per batch, which V5 asks of the keys.
IntegerList lengths_of(const OptionalIntListField& lengths, int64_t batches, int64_t tokens) {
  IntegerList all;
  for (int64_t b = 0; b < batches; ++b) {
    all.push_back(actual_length(lengths, b, tokens).expect_int());
  }
  return all;
}

// Says with the lengths of the keys, and a mask of one row, what a call with one query per batch
// keeps. CANN documents that such a call ignores the mode, the tokens and the lengths of queries.
void keep_by_lengths(const PromptFlashAttention& op, FusedInfer& call) {
  const auto mode = static_cast<SparseMode>(op.sparse_mode);
  for (size_t b = 0; b < call.key_lengths.size(); ++b) {
    auto& keys = call.key_lengths[b];
    if (call.query_lengths[b] == 0) {
      keys = 0;
    } else if (op.atten_mask) {
      const auto kept = kept_keys(mode, /*queries=*/1, keys, op.pre_tokens, op.next_tokens,
                                  /*prefix=*/0, /*is_band=*/false)
                            .first_keys(0);
      check_implemented(kept.has_value(), PromptFlashAttention::name, "pre_tokens", "expected ",
                        prompt_rules::kBandOfOneQuery.expected, ", got ", op.pre_tokens,
                        " for the ", keys, " keys of batch ", b);
      keys = *kept;
    }
  }
  call.atten_mask = op.atten_mask && !has_compressed_mask(mode)
                        ? std::optional(dense(call.atten_mask->narrow(-2, 0, 1)))
                        : std::nullopt;
  call.sparse_mode =
      static_cast<int64_t>(call.atten_mask ? SparseMode::all_mask : SparseMode::standard);
  call.pre_tokens = call.next_tokens = INT32_MAX;
}

void launch_v5(const PromptFlashAttention& op, const at::Tensor& out) {
  const auto axes = axes_of(op.layout.value());
  const auto query = dense(op.query);
  const auto key = dense(op.key);
  const auto value = dense(op.value);
  const int64_t batches = query.size(axes.batch);
  const int64_t queries = query.size(axes.tokens);
  FusedInfer call{
      .query = query,
      .key = key,
      .value = value,
      .query_lengths = lengths_of(op.actual_seq_lengths_query, batches, queries),
      .key_lengths = lengths_of(op.actual_seq_lengths_key, batches, key.size(axes.tokens)),
      .quant_scale2 = scale_of_v5(op.quant_scale2),
      .quant_offset2 = scale_of_v5(op.quant_offset2),
      .num_heads = op.num_heads.expect_int(),
      .scale_value = op.scale_value,
      .pre_tokens = op.pre_tokens,
      .next_tokens = op.next_tokens,
      .layout = op.layout.text(),
      .num_key_value_heads = op.num_key_value_heads.expect_int(),
      .sparse_mode = op.sparse_mode,
      .inner_precise = kInnerPrecise,
      .out = out};
  // V5 refuses an empty mask, and full masks of two axes.
  if (op.atten_mask && op.atten_mask->numel() != 0) {
    call.atten_mask = dense(*op.atten_mask);
    call.atten_mask = call.atten_mask->dim() == 2 ? call.atten_mask->unsqueeze(0) : call.atten_mask;
  }
  if (queries == 1 && key.numel() != 0) {
    keep_by_lengths(op, call);
  }
  aclnn_fused_infer_attention_score_v5(call);
}

void prompt_flash_attention(const PromptFlashAttention& op,
                            PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  const auto& out = std::get<0>(outputs);
  // Ascend 950 has no kernel for V3.
  if (runs_on(k950)) {
    launch_v5(op, out);
    return;
  }
  aclnn_prompt_flash_attention_v3(
      dense(op.query), dense(op.key), dense(op.value), std::nullopt, dense(op.atten_mask),
      op.actual_seq_lengths_query, op.actual_seq_lengths_key, dense(op.deq_scale1),
      dense(op.quant_scale1), dense(op.deq_scale2), dense(op.quant_scale2), dense(op.quant_offset2),
      op.num_heads.expect_int(), op.scale_value, op.pre_tokens, op.next_tokens, op.layout.text(),
      op.num_key_value_heads.expect_int(), op.sparse_mode, kInnerPrecise, out);
}

const Registration npu(c10::DispatchKey::PrivateUse1, [](torch::Library& m) {
  register_kernel_and_relaunch<PromptFlashAttention, prompt_flash_attention>(m);
});

}  // namespace
}  // namespace ascend_attn::aclnn
