// How an operator meets the dispatcher.
//
// An operator is a struct of its arguments, in the order of its schema, with
//   static constexpr name            the schema's name
//   using Outputs, Signature         what the dispatcher sees; an operator that works in place has
//                                    the outputs std::tuple<>, the schema's ()
//   Outputs check_and_allocate()     every rule about shapes, dtypes and limits, and the outputs
// and each backend adds one function `compute(const Op&, Outputs&)`. The same check_and_allocate
// serves NPU, CPU and Meta: it uses symbolic sizes and allocates with the options of the inputs.
// An operator without a gradient has
//   static constexpr no_gradient     why, in the words of its errors
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>

#include "core/error.h"

namespace ascend_attn {

// What the dispatcher has under the operator's name.
c10::OperatorHandle find_operator(const char* op);
// The argument of that position in the schema.
const std::string& argument_name(const char* op, size_t position);

// torch hands None on as an undefined tensor where the schema has a tensor.
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

template <typename Op, auto compute, typename Signature = typename Op::Signature>
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
  static const auto handle = find_operator(Op::name).template typed<typename Op::Signature>();
  return handle.call(std::forward<Args>(args)...);
}

// Registers the kernel of one operator for the backend of `library`.
template <typename Op, auto compute>
void register_kernel(torch::Library& library) {
  library.impl(Op::name, &Kernel<Op, compute>::call);
}

}  // namespace ascend_attn
