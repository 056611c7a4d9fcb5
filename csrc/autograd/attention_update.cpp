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
  const auto or_zeros = [](const at::Tensor& gradient, const at::Tensor& like) {
    return gradient.defined() ? gradient : like.new_zeros_symint(like.sym_sizes());
  };
  if (!d_outputs[0].defined() && !d_outputs[1].defined()) {
    return variable_list(op.lse.size() + op.local_out.size());
  }
  const auto [d_lse, d_local_out] =
      call(AttentionUpdateGrad{.d_out = or_zeros(d_outputs[0], op.local_out[0]),
                               .d_lse_out = or_zeros(d_outputs[1], op.lse[0]),
                               .lse = op.lse,
                               .local_out = op.local_out});
  return gradients_of(op, std::tuple(d_lse.unbind(), d_local_out.unbind()), op.lse, op.local_out);
}

}  // namespace ascend_attn
