#include "ops/attention_update.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "dispatch/operator_function.h"

namespace ascend_attn {
namespace {

// With w = softmax(lse) over the parts:
//   d_local_out[i] = w[i] * d_out
//   d_lse[i] = w[i] * (s[i] - sum of w[j] * s[j] + d_lse_out),  s[i] = d_out . local_out[i]
// Written with torch operators, part by part, so that it serves every backend.
void attention_update_grad(const AttentionUpdateGrad& op, AttentionUpdateGrad::Outputs& outputs) {
  const auto& [d_lse, d_local_out] = outputs;
  const auto lse = at::stack(op.lse);
  const auto empty = rows_without_keys(lse);
  const auto weights = at::softmax(lse, 0).masked_fill_(empty, 0);
  const auto d_out = op.d_out.to(lse.scalar_type());
  for (size_t i = 0; i < op.local_out.size(); ++i) {
    const auto part = static_cast<int64_t>(i);
    d_local_out[part].copy_(weights[part].unsqueeze(-1).mul(d_out));
    d_lse[part].copy_(d_out.mul(op.local_out[i]).sum(-1));
  }
  const auto mean = weights.mul(d_lse).sum(0);
  d_lse.sub_(mean).add_(op.d_lse_out).mul_(weights).masked_fill_(empty, 0);
}

struct AttentionUpdateFunction : OperatorFunction<AttentionUpdateFunction, AttentionUpdate> {
  static void save(AutogradContext* context, const AttentionUpdate& op, const Outputs&) {
    SavedCall<AttentionUpdate>::save(context, op, {});
  }

  static variable_list gradients(AutogradContext* context, const variable_list& d_outputs) {
    const SavedCall<AttentionUpdate> saved(context);
    const auto& op = saved.op();
    Gradients gradients(op);
    const auto& d_out = d_outputs[0];
    const auto& d_lse_out = d_outputs[1];
    if (d_out.defined() || d_lse_out.defined()) {
      const auto [d_lse, d_local_out] = call(AttentionUpdateGrad{
          .d_out = d_out.defined() ? d_out : at::zeros_like(op.local_out[0]),
          .d_lse_out = d_lse_out.defined() ? d_lse_out : at::zeros_like(op.lse[0]),
          .lse = op.lse,
          .local_out = op.local_out});
      gradients.set(op.lse, d_lse.unbind());
      gradients.set(op.local_out, d_local_out.unbind());
    }
    return gradients;
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  register_function<AttentionUpdate, &AttentionUpdateFunction::kernel>(m);
  register_function<AttentionUpdateGrad, &FirstDerivativeOnly<AttentionUpdateGrad>::kernel>(m);
}

TORCH_LIBRARY_IMPL(ascend, CompositeExplicitAutograd, m) {
  register_kernel<AttentionUpdateGrad, attention_update_grad>(m);
}

}  // namespace
}  // namespace ascend_attn
