#include "ops/sparse_flash_attention.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include "autograd/operator_function.h"
#include "core/sequence_lengths.h"

namespace ascend_attn {
namespace {

struct SparseFlashAttentionFunction
    : OperatorFunction<SparseFlashAttentionFunction, SparseFlashAttention> {
  static bool differentiable(const SparseFlashAttention& op) {
    check_lengths_have_gradient(op.name, op.layout, op.actual_seq_lengths_query,
                                op.actual_seq_lengths_key);
    return true;
  }

  static void save(AutogradContext* context, const SparseFlashAttention& op,
                   const Outputs& outputs) {
    const auto& [out, softmax_max, softmax_sum] = outputs;
    context->save_for_backward({op.query, op.key, op.value, op.sparse_indices, out, softmax_max,
                                softmax_sum, op.actual_seq_lengths_query.value_or(at::Tensor()),
                                op.actual_seq_lengths_key.value_or(at::Tensor()),
                                op.query_rope.value_or(at::Tensor()),
                                op.key_rope.value_or(at::Tensor())});
    context->mark_non_differentiable({softmax_max, softmax_sum});
    auto& options = context->saved_data;
    options["scale_value"] = op.scale_value;
    options["sparse_block_size"] = op.sparse_block_size;
    options["layout"] = std::string(op.layout);
    options["sparse_mode"] = op.sparse_mode;
    options["deterministic"] = op.deterministic || at::globalContext().deterministicAlgorithms();
  }

  static variable_list gradients(AutogradContext* context, const variable_list& incoming) {
    auto gradients = no_gradients();
    if (!incoming[0].defined()) {
      return gradients;
    }
    const auto saved = context->get_saved_variables();
    const auto optional = [&saved](size_t index) {
      return saved[index].defined() ? std::optional(saved[index]) : std::nullopt;
    };
    auto& options = context->saved_data;
    const auto query_rope = optional(9);
    auto [d_query, d_key, d_value, d_query_rope, d_key_rope] = call<SparseFlashAttentionGrad>(
        saved[0], saved[1], saved[2], saved[3], incoming[0], saved[4], saved[5], saved[6],
        options["scale_value"].toDouble(), optional(7), optional(8), query_rope, optional(10),
        options["sparse_block_size"].toInt(), options["layout"].toStringRef(),
        options["sparse_mode"].toInt(), kIgnoredTokens, kIgnoredTokens,
        options["deterministic"].toBool());
    gradients[0] = std::move(d_query);
    gradients[1] = std::move(d_key);
    gradients[2] = std::move(d_value);
    if (query_rope) {
      gradients[7] = std::move(d_query_rope);
      gradients[8] = std::move(d_key_rope);
    }
    return gradients;
  }

 private:
  // Both sparse modes of the operator ignore pre_tokens and next_tokens; this is what the device's
  // gradient wants to be told.
  static constexpr int64_t kIgnoredTokens = 2147483647;
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(SparseFlashAttention::name, &SparseFlashAttentionFunction::kernel);
  m.impl(SparseFlashAttentionGrad::name, &FirstDerivativeOnly<SparseFlashAttentionGrad>::kernel);
}

}  // namespace
}  // namespace ascend_attn
