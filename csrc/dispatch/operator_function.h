// Gives an operator its gradient. Its kernel for the Autograd key calls the backend directly unless
// a gradient is required; then it records a torch::autograd::Function.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string_view>
#include <tuple>
#include <utility>

#include "core/device_in_force.h"
#include "core/error.h"
#include "dispatch/saved_call.h"
#include "dispatch/without_gradient.h"

namespace ascend_attn {

// `Derived` supplies
//   static void save(AutogradContext*, const Op&, const Outputs&)
//   static variable_list gradients(AutogradContext*, const variable_list& d_outputs)
// and hides `differentiable` if a call may have nothing to differentiate, or no gradient, and
// `operands` if it has arguments that never get one.
template <typename Derived, typename Op>
struct OperatorFunction : torch::autograd::Function<Derived> {
  using Outputs = typename Op::Outputs;

  static bool differentiable(const Op&) { return true; }

  // Returns the call as autograd sees it.
  static const Op& operands(const Op& op) { return op; }

  static Outputs kernel(const Op& op) {
    check_no_tangent(op);
    if (!at::GradMode::is_enabled() || !requires_grad(op) || !Derived::differentiable(op)) {
      return call_below_autograd(op);
    }
    // Function::apply reads the device of every tensor, so none may be undefined.
    check_tensors_given(op);
    const auto& operands = Derived::operands(op);
    return std::apply(
        [](const auto&... fields) {
          // Every tensor, also of a list, is an argument of its own: autograd drops the gradients
          // of others without a word.
          return as_outputs(Derived::apply(as_parameter(fields)...),
                            std::make_index_sequence<std::tuple_size_v<Outputs>>());
        },
        arguments_of(operands));
  }

  template <typename... Arguments>
  static variable_list forward(AutogradContext* context, const Arguments&... arguments) {
    const Borrowed<Op> op(arguments...);
    const auto outputs = call_below_autograd(*op);
    context->set_materialize_grads(false);
    // The backward may run on an engine thread, where the caller's limits are not set.
    context->saved_data["limits"] = limits_override();
    Derived::save(context, *op, outputs);
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
  return variable_list(kArgumentCount<Op>);
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

}  // namespace ascend_attn
