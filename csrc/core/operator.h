// How an operator meets the dispatcher.
//
// An operator is one struct (csrc/ops/<operator>.h). Its fields are the arguments, in the order of
// the schema, and it has
//   static constexpr name, schema    what torch.ops.ascend knows
//   static constexpr functions       the aclnn functions that the NPU calls
//   static const limits              what they accept on each product
//   using Outputs                    a tuple of tensors; std::tuple<> when it works in place
//   static constexpr no_gradient     why it has none, in the words of its errors; if it has none
//   Outputs check_and_allocate()     every rule about shapes, dtypes and limits, and the outputs
// Each backend adds one function `compute(const Op&, Outputs&)`. The same check_and_allocate serves
// NPU, CPU and Meta: it uses symbolic sizes and allocates with the options of the inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>

#include "core/arguments.h"
#include "core/error.h"

namespace ascend_attn {

// What the dispatcher has under the operator's name.
c10::OperatorHandle find_operator(const char* op);
// The name of the argument at that position of the schema.
const std::string& argument_name(const char* op, size_t position);
// The position of the argument of that name.
size_t argument_position(const char* op, const char* name);
size_t argument_count(const char* op);

// torch passes None as an undefined tensor where the schema has a tensor.
template <typename... Args>
void check_tensors_given(const char* op, const Args&... args) {
  size_t position = 0;
  const auto check = [&](const auto& argument) {
    if constexpr (std::is_same_v<decltype(argument), const at::Tensor&>) {
      if (!argument.defined()) [[unlikely]] {
        raise(Violation::value, op, argument_name(op, position), "expected a tensor, got None",
              Status::null_pointer);
      }
    }
    ++position;
  };
  (check(args), ...);
}

template <typename Op, auto compute, typename Signature = SignatureOf<Op>>
struct Kernel;

template <typename Op, auto compute, typename... Args>
struct Kernel<Op, compute, typename Op::Outputs(Args...)> {
  static typename Op::Outputs call(Args... args) {
    check_tensors_given(Op::name, args...);
    const Op op{args...};
    auto outputs = op.check_and_allocate();
    compute(op, outputs);
    return outputs;
  }
};

// Calls an operator through the dispatcher.
template <typename Op, typename... Args>
typename Op::Outputs call(Args&&... args) {
  static const auto handle = find_operator(Op::name).template typed<SignatureOf<Op>>();
  return handle.call(std::forward<Args>(args)...);
}
template <typename Op>
typename Op::Outputs call(const Op& op) {
  return std::apply([](const auto&... args) { return call<Op>(args...); }, arguments_of(op));
}

// Registers the kernel of one operator for the backend of `library`.
template <typename Op, auto compute>
void register_kernel(torch::Library& library) {
  library.impl(Op::name, &Kernel<Op, compute>::call);
}

}  // namespace ascend_attn
