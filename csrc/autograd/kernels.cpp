// The kernels of the key Autograd. They call the backend directly unless a gradient is required;
// then they record a torch::autograd::Function. Operators that work in place have their own.
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "autograd/saved_call.h"
#include "core/device_in_force.h"
#include "core/error.h"
#include "dispatch/without_gradient.h"
#include "ops/operators.h"

namespace ascend_attn {

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

// Computes the gradients of an operator; null where a second derivative would begin.
using Backward = variable_list (*)(AutogradContext&, const variable_list&);

const std::unordered_map<std::string_view, Backward>& backward_functions() {
  static const auto functions = [] {
    std::unordered_map<std::string_view, Backward> of_names;
    const auto add = [&]<typename Op>() {
      if constexpr (HasBackward<Op>) {
        of_names[Op::name] = &Op::backward;
      } else {
        of_names[Op::name] = nullptr;
      }
    };
    Operators::for_each(add);
    PrivateOperators::for_each(add);
    return of_names;
  }();
  return functions;
}

// A recorded call of any operator: one for each would take torch's templates as many times. A
// gradient operator is recorded to raise on a second derivative through its results;
// create_graph=True alone is no error.
struct Recorded : torch::autograd::Function<Recorded> {
  using Compute = c10::function_ref<variable_list(AutogradContext&)>;

  static variable_list forward(AutogradContext* context, at::TensorList, const char* op,
                               Compute compute) {
    context->set_materialize_grads(false);
    context->saved_data["operator"] = op;
    // The backward may run on an engine thread, where the caller's limits are not set.
    context->saved_data["limits"] = limits_override();
    return compute(*context);
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const LimitsScope limits(context->saved_data["limits"].toInt());
    const auto& op = context->saved_data["operator"].toStringRef();
    const auto function = backward_functions().at(op);
    if (!function) {
      raise_second_derivative(op);
    }
    auto gradients = function(*context, d_outputs);
    gradients.resize(gradients.size() + 2);  // of what apply() takes besides the operands
    return gradients;
  }
};

template <typename Op>
typename Op::Outputs compute_and_save(AutogradContext& context, const Op& op) {
  if constexpr (RecordsAnotherCall<Op>) {
    const auto recorded = op.recorded();
    const auto outputs = call_below_autograd(recorded);
    recorded.save(context, outputs);
    return op.returned(outputs);
  } else {
    const auto outputs = call_below_autograd(op);
    if constexpr (HasBackward<Op>) {
      op.save(context, outputs);
    }
    return outputs;
  }
}

template <typename Op>
typename Op::Outputs compute_and_record(const Op& op) {
  check_no_tangent(op);
  if (!at::GradMode::is_enabled() || !requires_grad(op) || !is_differentiable(op)) {
    return call_below_autograd(op);
  }
  // Function::apply reads the device of every tensor, so none may be undefined.
  check_tensors_given(op);
  const auto operands = operands_of(op);
  const auto compute_all = [&op](AutogradContext& context) {
    return std::apply([](const auto&... tensors) { return variable_list{tensors...}; },
                      compute_and_save(context, op));
  };
  // apply() takes a TensorList apart, but drops the gradients of tensors in a std::vector or in a
  // struct without a word.
  auto outputs =
      Recorded::apply(at::TensorList(operands), Op::name, Recorded::Compute(compute_all));
  if constexpr (requires { op.constant_outputs(); }) {
    // Compiled autograd does not take torch's mark for them.
    for (const size_t index : op.constant_outputs()) {
      outputs[index] = outputs[index].detach();
    }
  }
  return [&]<size_t... index>(std::index_sequence<index...>) {
    return typename Op::Outputs{outputs[index]...};
  }(std::make_index_sequence<std::tuple_size_v<typename Op::Outputs>>());
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  const auto register_operator = [&]<typename Op>() {
    if constexpr (!HasNoGradient<Op>) {
      register_function<Op, &compute_and_record<Op>>(m);
    } else if constexpr (!WorksInPlace<Op>) {
      register_function<Op, &infer<Op>>(m);
    }
  };
  Operators::for_each(register_operator);
  PrivateOperators::for_each(register_operator);
}

}  // namespace
}  // namespace ascend_attn
