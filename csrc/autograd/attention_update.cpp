#include "ops/attention_update.h"

#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <limits>

#include "autograd/saved_call.h"
#include "dispatch/operator.h"

namespace ascend_attn {
namespace {

// With w = softmax(lse) over the parts:
//   d_local_out[i] = w[i] * d_out
//   d_lse[i] = w[i] * (s[i] - sum of w[j] * s[j] + d_lse_out),  s[i] = d_out . local_out[i]
// Written with torch operators, part by part, so that it serves every backend.
void attention_update_grad(const AttentionUpdateGrad& op, AttentionUpdateGrad::Outputs& outputs) {
  const auto& [d_lse, d_local_out] = outputs;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto given = at::stack(op.lse);
  const auto lse = given.masked_fill(given.eq(kInfinity), -kInfinity);
  const auto empty = rows_without_keys(lse);
  const auto weights = lse.softmax(0).masked_fill_(empty, 0);
  const auto d_out = op.d_out.to(lse.scalar_type());
  for (size_t i = 0; i < op.local_out.size(); ++i) {
    const auto part = static_cast<int64_t>(i);
    d_local_out[part].copy_(weights[part].unsqueeze(-1).mul(d_out));
    d_lse[part].copy_(d_out.mul(op.local_out[i]).sum(-1));
  }
  const auto mean = weights.mul(d_lse).sum(0);
  d_lse.sub_(mean).add_(op.d_lse_out).mul_(weights).masked_fill_(empty, 0);
}

TORCH_LIBRARY_IMPL(ascend, CompositeExplicitAutograd, m) {
  register_kernel<AttentionUpdateGrad, attention_update_grad>(m);
}

}  // namespace

void AttentionUpdate::save(AutogradContext& context, const Outputs&) const {
  SavedCall<AttentionUpdate>::save(context, *this, {});
}

variable_list AttentionUpdate::backward(AutogradContext& context, const variable_list& d_outputs) {
  const SavedCall<AttentionUpdate> saved(context);
  const auto& op = saved.op();
  Gradients gradients(op);
  const auto& d_out = d_outputs[0];
  const auto& d_lse_out = d_outputs[1];
  if (d_out.defined() || d_lse_out.defined()) {
    const auto [d_lse, d_local_out] = call(AttentionUpdateGrad{
        .d_out =
            d_out.defined() ? d_out : op.local_out[0].new_zeros_symint(op.local_out[0].sym_sizes()),
        .d_lse_out =
            d_lse_out.defined() ? d_lse_out : op.lse[0].new_zeros_symint(op.lse[0].sym_sizes()),
        .lse = op.lse,
        .local_out = op.local_out});
    gradients.set(op.lse, d_lse.unbind());
    gradients.set(op.local_out, d_local_out.unbind());
  }
  return gradients;
}

}  // namespace ascend_attn
