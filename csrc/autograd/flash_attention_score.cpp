#include "ops/flash_attention_score.h"

#include <ATen/ExpandUtils.h>

#include <optional>
#include <tuple>
#include <utility>

#include "autograd/saved_call.h"
#include "core/error.h"
#include "core/symbolic.h"
#include "dispatch/operator.h"

namespace ascend_attn {
namespace {

// The device's gradient does not take (1, N, 1, Skv) for several batches, as its forward does.
std::optional<at::Tensor> pse_of_gradient(const FlashAttentionScore& op) {
  const auto& pse = op.options.pse_shift;
  const auto axes = axes_of(op.options.layout.value());
  if (!pse || axes.packed() || pse->dim() != 4 || !known_equal(pse->sym_size(0), 1) ||
      !known_equal(pse->sym_size(2), 1)) {
    return pse;
  }
  const auto& batch = op.query.sym_size(axes.batch);
  return pse->expand_symint({batch, pse->sym_size(1), 1, pse->sym_size(3)}).contiguous();
}

}  // namespace

bool FlashAttentionScore::differentiable() const {
  const auto& pse = options.pse_shift;
  if (pse && pse->requires_grad()) {
    check_implemented(options.pse_type <= 1, name, "pse_shift",
                      "expected no gradient to be wanted of the slopes of pse_type ",
                      options.pse_type, ", got a tensor that requires grad; detach it");
    check_implemented(pse->device().is_cpu() || pse->is_meta(), name, "pse_shift",
                      "expected no gradient to be wanted on ", pse->device(),
                      ", whose aclnnFlashAttentionScoreGradV2 has none for it, got a tensor that "
                      "requires grad; detach it, or use the CPU");
  }
  return true;
}

void FlashAttentionScore::save(AutogradContext& context, const Outputs& outputs) const {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& pse = options.pse_shift;
  SavedCall<FlashAttentionScore>::save(context, *this, {out, softmax_max, softmax_sum});
  context.saved_data["pse_grad"] = pse && pse->requires_grad();
}

variable_list FlashAttentionScore::backward(AutogradContext& context,
                                            const variable_list& d_outputs) {
  const auto& d_out = d_outputs[0];
  const auto& d_softmax_sum = d_outputs[2];
  if (!d_out.defined() && !d_softmax_sum.defined()) {
    return no_gradients<FlashAttentionScore>();
  }
  const SavedCall<FlashAttentionScore> saved(context);
  const auto& op = saved.op();
  FlashAttentionExtendedGradArguments arguments{
      .query = op.query,
      .key = op.key,
      .value = op.value,
      .dy = if_defined(d_out),
      .softmax_max = saved.output(1),
      .softmax_sum = saved.output(2),
      .attention_in = saved.output(0),
      .options = op.options,
      .extra = op.extra,
      .d_softmax_sum = if_defined(d_softmax_sum),
      .pse_grad = context.saved_data["pse_grad"].toBool()};
  arguments.options.pse_shift = pse_of_gradient(op);
  if (!op.extra.given() && !arguments.pse_grad) {
    return gradients_of(op, call(FlashAttentionScoreGrad{arguments.without_extra()}), op.query,
                        op.key, op.value);
  }
  const auto& [pse, sink, query_rope, key_rope] =
      std::tie(op.options.pse_shift, op.extra.sink, op.extra.query_rope, op.extra.key_rope);
  auto gradients = call(FlashAttentionScoreExtendedGrad{arguments});
  auto& d_pse = std::get<6>(gradients);
  d_pse = arguments.pse_grad ? at::sum_to(d_pse, pse->sym_sizes()) : at::Tensor();
  return gradients_of(op, gradients, op.query, op.key, op.value, sink, query_rope, key_rope, pse);
}

}  // namespace ascend_attn
