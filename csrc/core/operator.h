// Connects operators to the dispatcher.
//
// An operator is one struct (csrc/ops/<operator>.h). Its fields are the arguments, in schema order,
// and it has
//   static constexpr name, schema    as in torch.ops.ascend
//   static constexpr functions       the aclnn functions that the NPU kernel calls
//   static const limits              what these functions accept on each product
//   using Outputs                    a tuple of tensors; std::tuple<> if it works in place
//   static constexpr no_gradient     only if it has no gradient: the reason, for error messages
//   Outputs check_and_allocate()     checks shapes, dtypes and limits, and allocates the outputs
// Each backend adds one function `compute(const Op&, Outputs&)`. NPU, CPU and Meta share
// check_and_allocate: it uses symbolic sizes and allocates with the options of the inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>

#include "core/arguments.h"
#include "core/error.h"
#include "core/tensor_checks.h"

namespace ascend_attn {

// Looks up one of our operators in the dispatcher.
c10::OperatorHandle find_operator(const char* op);
// Returns the name of the argument at a position of the schema.
const std::string& argument_name(const char* op, size_t position);
// Returns the position of a named argument in the schema.
size_t argument_position(const char* op, const char* name);
size_t argument_count(const char* op);

[[noreturn]] void raise_none(const char* op, size_t position, int64_t index = kNotInList);
[[noreturn]] void raise_no_memory(const char* op, size_t position, int64_t index,
                                  const at::Tensor& tensor);

// Rejects None for required tensors, which torch passes as an undefined tensor, and tensors whose
// memory was freed.
template <typename... Args>
void check_tensors_given(const char* op, const Args&... args) {
  size_t position = 0;
  const auto check_memory = [&](const at::Tensor& tensor, int64_t index) {
    if (!has_memory(tensor)) [[unlikely]] {
      raise_no_memory(op, position, index, tensor);
    }
  };
  const auto check = [&](const auto& argument) {
    if constexpr (std::is_same_v<decltype(argument), const at::Tensor&>) {
      if (!argument.defined()) [[unlikely]] {
        raise_none(op, position);
      }
      check_memory(argument, kNotInList);
    } else if constexpr (std::is_same_v<decltype(argument), const std::optional<at::Tensor>&>) {
      if (argument) {
        check_memory(*argument, kNotInList);
      }
    } else if constexpr (std::is_same_v<decltype(argument), const at::TensorList&>) {
      for (size_t index = 0; index < argument.size(); ++index) {
        if (!argument[index].defined()) [[unlikely]] {
          raise_none(op, position, static_cast<int64_t>(index));
        }
        check_memory(argument[index], static_cast<int64_t>(index));
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
