// The gradient of the log-sum-exp of sparse attention, for which CANN's functions have no input.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>
#include <type_traits>

#include "core/error.h"
#include "core/tensor_checks.h"

namespace ascend_attn::aclnn {

// Returns the call that computes the gradients of the log-sum-exp alone. `d_lse` has the shape of
// the statistics. The device reads key in place of value, so that d_out is all but 0: with t * e1,
// and -(d_lse / t) * e1 for out, the gradient of the scores is P * (d_lse + t * key[0]). Where
// d_lse is 0, as torch.compile passes it for a gradient that is missing, so is d_out.
template <typename Op>
Op call_of_statistics(const Op& op, const char* argument, const at::Tensor& d_lse) {
  constexpr double kTiny = 0x1p-60;
  check_implemented(op.query.scalar_type() == at::kBFloat16, op.name, argument,
                    "expected bfloat16 inputs on the NPU where a gradient flows into the "
                    "statistics, got ",
                    dtype_name(op.query.scalar_type()));
  const auto of_rows = d_lse.squeeze(-3);
  auto call = op;
  call.d_out = at::zeros_like(op.out);
  call.d_out->select(-1, 0).copy_(of_rows.ne(0)).mul_(kTiny);
  call.out = at::zeros_like(op.out);
  call.out.select(-1, 0).copy_(of_rows.mul(-1 / kTiny));
  return call;
}

// Computes the gradients of out, if it has one, by `of_out`. Another launch computes those of
// the statistics, of which the outputs `added` are added.
template <size_t... added, typename Op>
void add_gradients_of_statistics(bool has_out, const Op& of_out, const Op& of_statistics,
                                 const typename Op::Outputs& outputs,
                                 void (*compute)(const std::type_identity_t<Op>&,
                                                 typename Op::Outputs&)) {
  auto results = outputs;
  if (!has_out) {
    compute(of_statistics, results);
    return;
  }
  compute(of_out, results);
  const auto like = [](const at::Tensor& output) {
    return output.defined() ? new_like(output) : output;
  };
  auto others = std::apply(
      [&](const auto&... output) { return typename Op::Outputs{like(output)...}; }, outputs);
  compute(of_statistics, others);
  const auto add = [](const at::Tensor& output, const at::Tensor& other) {
    if (output.defined()) {
      output.add_(other);
    }
  };
  (add(std::get<added>(outputs), std::get<added>(others)), ...);
}

}  // namespace ascend_attn::aclnn
