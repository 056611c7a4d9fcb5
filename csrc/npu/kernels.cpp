// The NPU's kernels: one aclnn call each, its arguments in the order of the prototype.
#include <ATen/Context.h>

#include <tuple>

#include "npu/aclnn/launcher.h"
#include "ops/error.h"
#include "ops/layout.h"
#include "ops/limits.h"
#include "ops/operators.h"
#include "ops/tensor_argument.h"

namespace ascend_attn {
namespace {

using aclnn::launch;

// A list that is missing is empty, as torch_npu passes it.
c10::SymIntArrayRef list_or_empty(at::OptionalSymIntArrayRef list) {
  return list ? *list : c10::SymIntArrayRef();
}

// The argument asks for it, or torch.use_deterministic_algorithms does.
template <typename Op>
bool deterministic(const Op& op) {
  return op.deterministic || at::globalContext().deterministicAlgorithms();
}

// The device reads the keys in place of the values, as in absorbed multi-head latent attention:
// other values would give wrong numbers without a word.
template <typename Op>
void check_value_is_key(const Op& op) {
  const bool same = op.value.is_alias_of(op.key) && op.value.sizes() == op.key.sizes() &&
                    op.value.strides() == op.key.strides() &&
                    op.value.storage_offset() == op.key.storage_offset();
  check_implemented(same || !product_in_force(), Op::name, "value",
                    "expected key itself (absorbed multi-head latent attention), got a tensor of "
                    "its own; the CPU accepts any value");
}

void compute(const SparseFlashAttention& op, SparseFlashAttention::Outputs& outputs) {
  check_value_is_key(op);
  constexpr int64_t kAbsorbed = 2;
  constexpr bool kReturnSoftmaxLse = true;
  const auto& [out, softmax_max, softmax_sum] = outputs;
  launch<aclnn::SparseFlashAttention>(
      op.query, op.key, op.value, op.sparse_indices, std::nullopt, op.actual_seq_lengths_query,
      op.actual_seq_lengths_key, op.query_rope, op.key_rope, op.scale_value, op.sparse_block_size,
      op.layout, op.layout, op.sparse_mode, op.pre_tokens, op.next_tokens, kAbsorbed,
      kReturnSoftmaxLse, out, softmax_max, softmax_sum);
}

void compute(const SparseFlashAttentionGrad& op, SparseFlashAttentionGrad::Outputs& outputs) {
  check_value_is_key(op);
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  launch<aclnn::SparseFlashAttentionGrad>(
      op.query, op.key, op.value, op.sparse_indices, op.d_out, op.out, op.softmax_max,
      op.softmax_sum, op.actual_seq_lengths_query, op.actual_seq_lengths_key, op.query_rope,
      op.key_rope, op.scale_value, op.sparse_block_size, op.layout, op.sparse_mode, op.pre_tokens,
      op.next_tokens, deterministic(op), d_query, d_key, d_value, d_query_rope, d_key_rope);
}

void compute(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  const auto& [sparse_indices, sparse_values] = outputs;
  launch<aclnn::LightningIndexer>(op.query, op.key, op.weights, op.actual_seq_lengths_query,
                                  op.actual_seq_lengths_key, std::nullopt, op.layout, op.layout,
                                  op.sparse_count.expect_int(), op.sparse_mode, op.pre_tokens,
                                  op.next_tokens, op.return_values, sparse_indices, sparse_values);
}

void compute(const LightningIndexerGrad& op, LightningIndexerGrad::Outputs& outputs) {
  const auto& [d_query, d_key, d_weights] = outputs;
  launch<aclnn::LightningIndexerGrad>(op.query, op.key, op.d_values, op.sparse_indices, op.weights,
                                      op.actual_seq_lengths_query, op.actual_seq_lengths_key,
                                      op.query.size(-2), op.layout, op.sparse_mode, op.pre_tokens,
                                      op.next_tokens, deterministic(op), d_query, d_key, d_weights);
}

void compute(const SparseLightningIndexerGradKLLoss& op,
             SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  const auto& [d_query_index, d_key_index, d_weights, loss] = outputs;
  launch<aclnn::SparseLightningIndexerGradKLLoss>(
      op.query, op.key, op.query_index, op.key_index, op.weights, op.sparse_indices, op.softmax_max,
      op.softmax_sum, op.query_rope, op.key_rope, list_or_empty(op.actual_seq_lengths_query),
      list_or_empty(op.actual_seq_lengths_key), op.scale_value, op.layout, op.sparse_mode,
      op.pre_tokens, op.next_tokens, deterministic(op), d_query_index, d_key_index, d_weights,
      loss);
}

// Functions of layout TND take the lengths, and are otherwise the same: `before` and `after` are
// the arguments on both sides of the lists.
template <typename Dense, typename Packed, typename... Before, typename... After>
void launch_attention(const FlashAttentionOptions& options, std::tuple<Before...> before,
                      std::tuple<After...> after) {
  const auto call = [&](const auto& function, auto... lengths) {
    std::apply(
        [&](const auto&... arguments) { function(arguments...); },
        std::tuple_cat(
            before, std::tuple(list_or_empty(options.prefix), lengths...),
            std::tuple(list_or_empty(options.q_start_idx), list_or_empty(options.kv_start_idx),
                       options.scale_value, options.keep_prob, options.pre_tokens,
                       options.next_tokens, options.num_heads.expect_int(), options.layout,
                       options.inner_precise, options.sparse_mode, options.pse_type),
            after));
  };
  if (options.layout == layout_name(Layout::TND)) {
    call(launch<Packed>, list_or_empty(options.actual_seq_lengths_query),
         list_or_empty(options.actual_seq_lengths_key));
  } else {
    call(launch<Dense>);
  }
}

void compute(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& o = op.options;
  // Never written: the function reserves it.
  const auto softmax_out = new_tensor({0}, op.query.options());
  launch_attention<aclnn::FlashAttentionScore, aclnn::FlashAttentionVarLenScore>(
      o,
      std::forward_as_tuple(op.query, op.key, op.value, o.pse_shift, o.drop_mask, std::nullopt,
                            o.atten_mask),
      std::forward_as_tuple(softmax_max, softmax_sum, softmax_out, out));
}

void compute(const FlashAttentionScoreGrad& op, FlashAttentionScoreGrad::Outputs& outputs) {
  const auto& [dq, dk, dv] = outputs;
  const auto& o = op.options;
  // Never written, the function has no gradient of pse_shift; torch_npu passes its sizes as well.
  const auto dpse = o.pse_shift ? new_like(*o.pse_shift) : new_tensor({0}, op.query.options());
  launch_attention<aclnn::FlashAttentionScoreGrad, aclnn::FlashAttentionUnpaddingScoreGrad>(
      o,
      std::forward_as_tuple(op.query, op.key, op.value, op.dy, o.pse_shift, o.drop_mask,
                            std::nullopt, o.atten_mask, op.softmax_max, op.softmax_sum,
                            std::nullopt, op.attention_in),
      std::forward_as_tuple(dq, dk, dv, dpse));
}

void compute(const PromptFlashAttention& op, PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  // The function takes no strides.
  const auto dense = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(tensor->contiguous()) : std::nullopt;
  };
  launch<aclnn::PromptFlashAttention>(
      op.query.contiguous(), op.key.contiguous(), op.value.contiguous(), std::nullopt,
      dense(op.atten_mask), list_or_empty(op.actual_seq_lengths_query),
      list_or_empty(op.actual_seq_lengths_key), dense(op.deq_scale1), dense(op.quant_scale1),
      dense(op.deq_scale2), dense(op.quant_scale2), dense(op.quant_offset2),
      op.num_heads.expect_int(), op.scale_value, op.pre_tokens, op.next_tokens, op.layout,
      op.num_key_value_heads.expect_int(), op.sparse_mode, std::get<0>(outputs));
}

void compute(const ScatterPaKvCache& op, ScatterPaKvCache::Outputs&) {
  op.check_memory();
  if (op.key.numel() == 0) {
    return;
  }
  // A null pointer is an error: a tensor without axes says that there are no values.
  const auto none = op.value ? at::Tensor() : new_tensor({}, op.key.options());
  launch<aclnn::ScatterPaKvCache>(
      op.key, op.key_cache, op.slot_mapping, op.value ? *op.value : none,
      op.value_cache ? *op.value_cache : none, op.compress_lens, op.compress_seq_offset,
      op.seq_lens, op.cache_mode, op.scatter_mode, std::optional(op.strides),
      std::optional(op.offsets));
}

template <typename... Ops>
void register_npu(OperatorList<Ops...>, torch::Library& library) {
  (register_kernel<Ops, static_cast<void (*)(const Ops&, typename Ops::Outputs&)>(&compute)>(
       library),
   ...);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) { register_npu(Operators(), m); }

}  // namespace
}  // namespace ascend_attn
