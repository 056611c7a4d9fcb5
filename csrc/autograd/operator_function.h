// Gives an operator its gradient. Its kernel for the Autograd key calls the backend directly unless
// a gradient is wanted; then it records a torch::autograd::Function.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "autograd/saved_call.h"
#include "core/error.h"
#include "core/limits.h"
#include "core/operator.h"

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
    if (at::GradMode::is_enabled()) {
      size_t position = 0;
      (check_no_gradient(position++, args), ...);
    }
    before(op);
    const auto outputs = [&] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<Op>(args...);
    }();
    after(op);
    return outputs;
  }

 private:
  template <typename Argument>
  static void check_no_gradient(size_t position, const Argument& argument) {
    if (requires_grad(argument)) [[unlikely]] {
      raise(Violation::not_implemented, Op::name, argument_name(Op::name, position),
            c10::str("expected a tensor without gradient, since ", Op::no_gradient,
                     ", got one that requires grad; call it under torch.no_grad(), or detach the "
                     "tensor"));
    }
  }
};

}  // namespace ascend_attn
