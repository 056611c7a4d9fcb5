// For kernels of the key Autograd, and of the keys that come before it: checks of calls that record
// no gradient.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <string_view>

#include "core/error.h"
#include "dispatch/operator.h"

namespace ascend_attn {

template <typename Call>
bool requires_grad(const Call& call) {
  return any_tensor(call, [](const at::Tensor& tensor, Place) { return tensor.requires_grad(); });
}

// Rejects dual tensors: forward-mode AD would silently treat the outputs as constants.
template <typename Call>
void check_no_tangent(const Call& call) {
  // Tangents exist only inside a forward-AD level.
  const bool dual = torch::autograd::ForwardADLevel::try_get_by_idx(0) &&
                    any_tensor(call, [](const at::Tensor& tensor, Place) {
                      return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
                    });
  check_implemented(!dual, Call::name, "gradient",
                    "expected tensors without forward-mode tangents, which this operator has no "
                    "rule for, got a dual tensor");
}

// Raises if an argument requires grad where gradients are recorded.
template <typename Call>
void check_no_gradient(const Call& call, const char* reason) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for_each_tensor(call, [&](const at::Tensor& tensor, Place place) {
    if (tensor.requires_grad()) [[unlikely]] {
      raise(Violation::not_implemented, Call::name, argument_name(Call::name, place.position),
            c10::str("expected a tensor without gradient, since ", reason,
                     ", got one that requires grad; call it under torch.no_grad(), or detach the "
                     "tensor"));
    }
  });
}

// Checks that a call may write to a tensor, because torch would raise only after the write. `name`
// returns the tensor's name.
template <typename Name>
void check_version(const char* op, const Name& name, const at::Tensor& written) {
  if (written.defined() && written.is_inference() && !c10::InferenceMode::is_enabled())
      [[unlikely]] {
    raise(Violation::value, op, name(),
          "expected a tensor that may be written to here, got one made in inference mode; call it "
          "under torch.inference_mode(), or make the tensor outside of it");
  }
}

// Tells autograd about a write, so that it refuses a backward through a tensor that has changed.
inline void bump_version(const at::Tensor& written) {
  written.unsafeGetTensorImpl()->bump_version();
}

// For kernels of the key Negative: torch's own fallback does not take what our operators write to.
template <typename Name>
void check_not_negated(const char* op, const Name& name, const at::Tensor& written) {
  if (written.is_neg()) [[unlikely]] {
    raise(Violation::value, op, name(),
          "expected a tensor that holds its values, got a view that negates them");
  }
}
template <typename Op>
Op without_negation(const Op& op) {
  return map_tensors(op, [](const at::Tensor& tensor, Place) { return tensor.resolve_neg(); });
}

template <typename Call>
auto call_below_autograd(const Call& operation) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call(operation);
}

// The kernel of an operator for inference: raises if an argument requires grad.
template <typename Op>
typename Op::Outputs infer(const Op& op) {
  check_no_tangent(op);
  check_no_gradient(op, Op::no_gradient);
  return call_below_autograd(op);
}

}  // namespace ascend_attn
