// Gives an operator its gradient. Its kernel for the Autograd key calls the backend directly unless
// a gradient is wanted; then it records a torch::autograd::Function.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/device_in_force.h"
#include "core/error.h"
#include "dispatch/operator.h"
#include "dispatch/saved_call.h"

namespace ascend_attn {

inline bool requires_grad(const at::Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->requires_grad();
}
inline bool requires_grad(at::TensorList list) {
  return std::ranges::any_of(list, [](const at::Tensor& tensor) { return requires_grad(tensor); });
}
template <typename T>
bool requires_grad(const T&) {
  return false;
}

inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
inline bool has_tangent(const std::optional<at::Tensor>& tensor) {
  return tensor && has_tangent(*tensor);
}
inline bool has_tangent(at::TensorList list) {
  return std::ranges::any_of(list, [](const at::Tensor& tensor) { return has_tangent(tensor); });
}
template <typename T>
bool has_tangent(const T&) {
  return false;
}

// Rejects dual tensors: forward-mode AD would silently treat the outputs as constants.
template <typename Op, typename... Args>
void check_no_tangent(const Args&... args) {
  // Tangents exist only inside a forward-AD level.
  const bool dual =
      torch::autograd::ForwardADLevel::try_get_by_idx(0) && (has_tangent(args) || ...);
  check_implemented(!dual, Op::name, "gradient",
                    "expected tensors without forward-mode tangents, which this operator has no "
                    "rule for, got a dual tensor");
}

// `Derived` supplies
//   static void save(AutogradContext*, const Op&, const Outputs&)
//   static variable_list gradients(AutogradContext*, const variable_list& d_outputs)
// and hides `differentiable` if a call may have nothing to differentiate, or no gradient, and
// `operand` if it has arguments that never get one.
template <typename Derived, typename Op, typename Signature = SignatureOf<Op>>
struct OperatorFunction;

template <typename Derived, typename Op, typename... Args>
struct OperatorFunction<Derived, Op, typename Op::Outputs(Args...)>
    : torch::autograd::Function<Derived> {
  using Outputs = typename Op::Outputs;

  static bool differentiable(const Op&) { return true; }

  // Returns what autograd sees of an argument of `op`.
  template <typename Argument>
  static const Argument& operand(const Op&, const Argument& argument) {
    return argument;
  }

  static Outputs kernel(Args... args) {
    check_no_tangent<Op>(args...);
    const bool wanted = at::GradMode::is_enabled() && (requires_grad(args) || ...) &&
                        Derived::differentiable(Op{args...});
    if (!wanted) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<Op>(args...);
    }
    // Function::apply reads the device of every tensor, so none may be undefined.
    check_tensors_given(Op::name, args...);
    const Op op{args...};
    return as_outputs(Derived::apply(Derived::operand(op, args)...),
                      std::make_index_sequence<std::tuple_size_v<Outputs>>());
  }

  static variable_list forward(AutogradContext* context, Args... args) {
    const auto outputs = [&] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<Op>(args...);
    }();
    context->set_materialize_grads(false);
    // The backward may run on an engine thread, where the caller's limits are not set.
    context->saved_data["limits"] = limits_override();
    Derived::save(context, Op{args...}, outputs);
    return std::apply([](const auto&... tensors) { return variable_list{tensors...}; }, outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const LimitsScope limits(context->saved_data["limits"].toInt());
    return Derived::gradients(context, d_outputs);
  }

 private:
  template <size_t... index>
  static Outputs as_outputs(const variable_list& tensors, std::index_sequence<index...>) {
    return {tensors[index]...};
  }
};

// Returns an undefined gradient for every argument of an operator without lists of tensors.
template <typename Op>
variable_list no_gradients() {
  return variable_list(argument_count(Op::name));
}

[[noreturn]] inline void raise_second_derivative(std::string_view op) {
  raise(Violation::not_implemented, op, "gradient",
        "expected a first derivative, got a second derivative, which this operator does not have");
}

// Makes a gradient operator raise on a second derivative through its results; create_graph=True
// alone is no error.
template <typename Op>
struct FirstDerivativeOnly : OperatorFunction<FirstDerivativeOnly<Op>, Op> {
  static void save(AutogradContext*, const Op&, const typename Op::Outputs&) {}
  static variable_list gradients(AutogradContext*, const variable_list&) {
    raise_second_derivative(Op::name);
  }
};

// Raises if an argument requires grad where gradients are recorded.
template <typename Op, typename... Args>
void check_no_gradient(const char* reason, const Args&... args) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  size_t position = 0;
  const auto check = [&](const auto& argument) {
    if (requires_grad(argument)) [[unlikely]] {
      raise(Violation::not_implemented, Op::name, argument_name(Op::name, position),
            c10::str("expected a tensor without gradient, since ", reason,
                     ", got one that requires grad; call it under torch.no_grad(), or detach the "
                     "tensor"));
    }
    ++position;
  };
  (check(args), ...);
}

// Checks that a call may write to a tensor, because torch would raise only after the write. `name`
// returns its name.
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
inline void check_not_negated(const char* op, std::string_view name, const at::Tensor& written) {
  check_value(!written.is_neg(), op, name,
              "expected a tensor that holds its values, got a view that negates them");
}

inline at::Tensor without_negation(const at::Tensor& tensor) { return tensor.resolve_neg(); }
inline std::optional<at::Tensor> without_negation(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(tensor->resolve_neg()) : std::nullopt;
}
inline std::vector<at::Tensor> without_negation(at::TensorList tensors) {
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) {
    all.push_back(tensor.resolve_neg());
  }
  return all;
}
template <typename T>
const T& without_negation(const T& other) {
  return other;
}

template <typename Op>
void nothing(const Op&) {}

// The kernel of an inference operator: raises if an argument requires grad. `before` and `after`
// run around the call.
template <typename Op, auto before = nothing<Op>, auto after = nothing<Op>,
          typename Signature = SignatureOf<Op>>
struct InferenceOnly;

template <typename Op, auto before, auto after, typename... Args>
struct InferenceOnly<Op, before, after, typename Op::Outputs(Args...)> {
  static typename Op::Outputs kernel(Args... args) {
    const Op op{args...};
    check_no_tangent<Op>(args...);
    check_no_gradient<Op>(Op::no_gradient, args...);
    before(op);
    const auto outputs = [&] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<Op>(args...);
    }();
    after(op);
    return outputs;
  }
};

}  // namespace ascend_attn
