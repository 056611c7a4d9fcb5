// The `out=` overload of the operators that have one: which tensors it may write to, and what
// torch.compile makes of it.
#include <ATen/FunctionalTensorWrapper.h>
#include <torch/library.h>

#include <algorithm>

#include "dispatch/without_gradient.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

namespace functionalization = at::functionalization::impl;

template <typename Op, typename Visitor>
void for_each_output(const OutCall<Op>& call, const Visitor& visit) {
  for (size_t index = 0; index < call.outputs.size(); ++index) {
    visit([&] { return output_name(Op::name, index); }, *call.outputs[index]);
  }
}

// Inference mode, and calls with nothing but its tensors, come here without the checks below.
template <typename Op>
typename Op::Outputs write(const OutCall<Op>& call) {
  for_each_output(call, [](const auto& name, const at::Tensor& output) {
    check_version(Op::name, name, output);
  });
  auto written = call_below_autograd(call);
  for_each_output(call, [](const auto&, const at::Tensor& output) { bump_version(output); });
  return written;
}

template <typename Op>
typename Op::Outputs write_without_gradient(const OutCall<Op>& call) {
  check_no_tangent(call);
  check_no_gradient(call, Op::no_gradient);
  return write(call);
}

bool is_traced(const at::Tensor& tensor, Place) {
  return functionalization::isFunctionalTensor(tensor);
}

// Returns the tensor that a traced one stands for at this point of the trace.
at::Tensor untraced(const at::Tensor& tensor, Place) {
  functionalization::sync(tensor);
  return functionalization::from_functional_tensor(tensor, /*assert_functional=*/false);
}

void replace(const at::Tensor& output, const at::Tensor& result) {
  functionalization::replace_(output, result);
  functionalization::commit_update(output);
  functionalization::sync(output);
}

// A trace cannot write: it calls the functional overload, and the results replace the outputs until
// the trace ends. The compiler then copies them, or writes in place.
template <typename Op>
typename Op::Outputs functionalize(const OutCall<Op>& operation) {
  check_tensors_given(operation);
  const bool all_traced = std::ranges::all_of(
      operation.outputs, [](const at::Tensor* output) { return is_traced(*output, {}); });
  if (!all_traced) {
    // Traced values cannot be written to tensors that are none.
    check_implemented(!any_tensor(operation, is_traced), Op::name, output_name(Op::name, 0),
                      "expected all outputs to be traced by functionalization, got one that is "
                      "not beside tensors that are");
    const at::AutoDispatchSkipFunctionalize below_functionalization;
    return call(operation);
  }
  const auto results = [&] {
    for (const auto* output : operation.outputs) {
      functionalization::sync(*output);
    }
    const at::AutoDispatchSkipFunctionalize below_functionalization;
    return call(map_tensors(operation.op, untraced));
  }();
  check_outputs_apart(operation);
  auto source = operation.source();
  auto output = operation.outputs.begin();
  std::apply(
      [&](const auto&... result) {
        (source.tensor_like(result), ...);
        (replace(**output++, result), ...);
      },
      results);
  return operation.written();
}

template <typename Op>
typename Op::Outputs resolve_negation(const OutCall<Op>& operation) {
  check_tensors_given(operation);
  for_each_output(operation, [](const auto& name, const at::Tensor& output) {
    check_not_negated(Op::name, name, output);
  });
  return call(OutCall<Op>{without_negation(operation.op), operation.outputs});
}

// Calls `add` with every operator that has the overload.
template <typename Add>
void for_each_with_out(const Add& add) {
  Operators::for_each([&]<typename Op>() {
    if constexpr (HasOutOverload<Op>) {
      add.template operator()<Op>();
    }
  });
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  for_each_with_out(
      [&]<typename Op>() { register_out_function<Op, &write_without_gradient<Op>>(m); });
}

TORCH_LIBRARY_IMPL(ascend, ADInplaceOrView, m) {
  for_each_with_out([&]<typename Op>() { register_out_function<Op, &write<Op>>(m); });
}

TORCH_LIBRARY_IMPL(ascend, Negative, m) {
  for_each_with_out([&]<typename Op>() { register_out_function<Op, &resolve_negation<Op>>(m); });
}

TORCH_LIBRARY_IMPL(ascend, Functionalize, m) {
  for_each_with_out([&]<typename Op>() { register_out_function<Op, &functionalize<Op>>(m); });
}

}  // namespace
}  // namespace ascend_attn
