// The kernels of the key Autograd. They call the backend directly unless a gradient is required;
// then they record a torch::autograd::Function. Operators that work in place have their own.
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>
#include <utility>

#include "autograd/context.h"
#include "core/device_in_force.h"
#include "core/error.h"
#include "dispatch/without_gradient.h"
#include "ops/operators.h"

namespace ascend_attn {

void AutogradContext::save_for_backward(variable_list tensors) {
  context_.save_for_backward(std::move(tensors));
}
variable_list AutogradContext::get_saved_variables() const {
  return context_.get_saved_variables();
}
void AutogradContext::mark_non_differentiable(const variable_list& outputs) {
  context_.mark_non_differentiable(outputs);
}
c10::IValue& AutogradContext::saved_data(const std::string& name) {
  return context_.saved_data[name];
}

void raise_second_derivative(std::string_view op) {
  raise(Violation::not_implemented, op, "gradient",
        "expected a first derivative, got a second derivative, which this operator does not have");
}

namespace {

template <typename Op>
concept HasNoGradient = requires { Op::no_gradient; };
template <typename Op>
concept WorksInPlace = std::tuple_size_v<typename Op::Outputs> == 0;
template <typename Op>
concept HasBackward = requires { &Op::backward; };
// The backward needs an output that the caller may leave out.
template <typename Op>
concept RecordsAnotherCall = requires { &Op::recorded; };

using Operands = c10::SmallVector<at::Tensor, 8>;

// Returns the tensors that autograd gives a gradient.
template <typename Op>
Operands operands_of(const Op& op) {
  Operands operands;
  if constexpr (requires { op.operands(); }) {
    operands = op.operands();
  } else {
    for_each_tensor(op, [&](const at::Tensor& tensor, Place) { operands.push_back(tensor); });
  }
  return operands;
}

template <typename Op>
bool is_differentiable(const Op& op) {
  if constexpr (requires { op.differentiable(); }) {
    return op.differentiable();
  } else {
    return true;
  }
}

// A recorded call of `Op`. A gradient operator is recorded to raise on a second derivative through
// its results; create_graph=True alone is no error.
template <typename Op>
struct Recorded : torch::autograd::Function<Recorded<Op>> {
  using Outputs = typename Op::Outputs;
  using Context = torch::autograd::AutogradContext;

  static Outputs kernel(const Op& op) {
    check_no_tangent(op);
    if (!at::GradMode::is_enabled() || !requires_grad(op) || !is_differentiable(op)) {
      return call_below_autograd(op);
    }
    // Function::apply reads the device of every tensor, so none may be undefined.
    check_tensors_given(op);
    const auto operands = operands_of(op);
    // apply() takes a TensorList apart, but drops the gradients of tensors in a std::vector or in a
    // struct without a word.
    return as_outputs(Recorded::apply(at::TensorList(operands), op),
                      std::make_index_sequence<std::tuple_size_v<Outputs>>());
  }

  static variable_list forward(Context* context, at::TensorList, const Op& op) {
    context->set_materialize_grads(false);
    // The backward may run on an engine thread, where the caller's limits are not set.
    context->saved_data["limits"] = limits_override();
    return std::apply([](const auto&... tensors) { return variable_list{tensors...}; },
                      compute(context, op));
  }

  static variable_list backward(Context* context, const variable_list& d_outputs) {
    const LimitsScope limits(context->saved_data["limits"].toInt());
    if constexpr (HasBackward<Op>) {
      AutogradContext saved(*context);
      auto gradients = Op::backward(saved, d_outputs);
      gradients.emplace_back();  // of `op` itself, which is no tensor
      return gradients;
    } else {
      raise_second_derivative(Op::name);
    }
  }

 private:
  static Outputs compute(Context* context, const Op& op) {
    if constexpr (RecordsAnotherCall<Op>) {
      const auto recorded = op.recorded();
      const auto outputs = call_below_autograd(recorded);
      AutogradContext saved(*context);
      recorded.save(saved, outputs);
      return op.returned(saved, outputs);
    } else {
      const auto outputs = call_below_autograd(op);
      if constexpr (HasBackward<Op>) {
        AutogradContext saved(*context);
        op.save(saved, outputs);
      }
      return outputs;
    }
  }

  template <size_t... index>
  static Outputs as_outputs(const variable_list& tensors, std::index_sequence<index...>) {
    return {tensors[index]...};
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  const auto register_operator = [&]<typename Op>() {
    if constexpr (!HasNoGradient<Op>) {
      register_function<Op, &Recorded<Op>::kernel>(m);
    } else if constexpr (!WorksInPlace<Op>) {
      register_function<Op, &infer<Op>>(m);
    }
  };
  Operators::for_each(register_operator);
  PrivateOperators::for_each(register_operator);
}

}  // namespace
}  // namespace ascend_attn
