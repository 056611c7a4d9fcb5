// Connects operators to the dispatcher.
//
// An operator is one struct (csrc/ops/<operator>.h). Its fields are the arguments, in schema order,
// and it has
//   static constexpr name, schema    as in torch.ops.ascend
//   static constexpr functions       the aclnn functions that the NPU kernel calls
//   static const limits              what these functions accept on each product
//   using Outputs                    a tuple of tensors; std::tuple<> if it works in place
//   static constexpr no_gradient     only if it has no gradient: the reason, for error messages
//   Outputs check_and_allocate()     checks shapes, dtypes and limits, and allocates the outputs;
//                                    one that has a form `out` takes an OutputSource
// Each backend adds one function `compute(const Op&, Outputs&)`. NPU, CPU and Meta share
// check_and_allocate: it uses symbolic sizes and allocates with the options of the inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/tensor_checks.h"
#include "dispatch/arguments.h"
#include "dispatch/outputs.h"

namespace ascend_attn {

// The overload that writes to tensors of the caller.
inline constexpr const char* kOut = "out";

// Looks up one of our operators in the dispatcher.
c10::OperatorHandle find_operator(const char* op, const char* overload = "");
// Returns the name of the argument at a position of the schema. The outputs follow the arguments,
// as in the form `out`.
const std::string& argument_name(const char* op, size_t position);
const std::string& output_name(const char* op, size_t index);
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

template <typename Op, auto compute, typename Signature = SignatureOf<Op>,
          typename Outputs = typename Op::Outputs>
struct OutKernel;

template <typename Op, auto compute, typename... Args, typename... Tensors>
struct OutKernel<Op, compute, typename Op::Outputs(Args...), std::tuple<Tensors...>> {
  static typename Op::Outputs call(Args... args, const Tensors&... given) {
    check_tensors_given(Op::name, args..., given...);
    const Op op{args...};
    const std::array outputs_given{&given...};
    auto outputs = op.check_and_allocate(OutputSource(Op::name, outputs_given.data()));
    const WrittenMemory written(Op::name, outputs_given.data(), outputs_given.size());
    size_t position = 0;
    (written.check_apart(position++, args), ...);
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

// Calls the form `out`, with the arguments and the tensors to be written.
template <typename Op, typename... Args>
typename Op::Outputs call_out(Args&&... args) {
  static const auto handle = find_operator(Op::name, kOut).template typed<OutSignatureOf<Op>>();
  return handle.call(std::forward<Args>(args)...);
}

// Registers a kernel of the form `out`.
template <typename Op, typename Function>
void register_out(torch::Library& library, Function* kernel) {
  library.impl(c10::str(Op::name, ".", kOut).c_str(), kernel);
}

// Registers the kernel of one operator, in all its forms, for the backend of `library`.
template <typename Op, auto compute>
void register_kernel(torch::Library& library) {
  library.impl(Op::name, &Kernel<Op, compute>::call);
  if constexpr (HasOutForm<Op>) {
    register_out<Op>(library, &OutKernel<Op, compute>::call);
  }
}

}  // namespace ascend_attn
