#include "ops/sparse_flash_attention.h"

#include <cstdint>
#include <utility>

#include "autograd/saved_call.h"
#include "core/determinism.h"
#include "core/error.h"
#include "dispatch/operator.h"

namespace ascend_attn {
namespace {

// The sparse modes ignore pre_tokens and next_tokens; the device's gradient requires this value.
constexpr int64_t kIgnoredTokens = INT32_MAX;

}  // namespace

bool SparseFlashAttention::differentiable() const {
  check_implemented(!pages.given(), name, "layout_kv",
                    "expected keys without a block table where a gradient is required, got "
                    "PA_BSND; call it under torch.no_grad(), or detach the tensors");
  check_implemented(return_softmax_lse, name, "return_softmax_lse",
                    "expected True where a gradient is required, whose backward reads the "
                    "statistics, got False; call it under torch.no_grad(), or detach the tensors");
  return true;
}

void SparseFlashAttention::save(AutogradContext& context, const Outputs& outputs) const {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  SavedCall<SparseFlashAttention>::save(context, *this, {out, softmax_max, softmax_sum});
  context.saved_data["deterministic"] = is_deterministic(options.deterministic);
}

variable_list SparseFlashAttention::backward(AutogradContext& context,
                                             const variable_list& d_outputs) {
  const auto& d_out = d_outputs[0];
  const auto& d_softmax_sum = d_outputs[2];
  if (!d_out.defined() && !d_softmax_sum.defined()) {
    return no_gradients<SparseFlashAttention>();
  }
  const SavedCall<SparseFlashAttention> saved(context);
  const auto& op = saved.op();
  auto options = op.options;
  options.pre_tokens = options.next_tokens = kIgnoredTokens;
  options.deterministic = context.saved_data["deterministic"].toBool();
  const auto gradients = call(SparseFlashAttentionGrad{.query = op.query,
                                                       .key = op.key,
                                                       .value = op.value,
                                                       .sparse_indices = op.sparse_indices,
                                                       .d_out = if_defined(d_out),
                                                       .out = saved.output(0),
                                                       .softmax_max = saved.output(1),
                                                       .softmax_sum = saved.output(2),
                                                       .options = options,
                                                       .d_softmax_sum = if_defined(d_softmax_sum)});
  return gradients_of(op, gradients, op.query, op.key, op.value, op.options.query_rope,
                      op.options.key_rope);
}

}  // namespace ascend_attn
