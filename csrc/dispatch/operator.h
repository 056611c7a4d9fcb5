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
//                                    with an `out=` overload, it takes an OutputSource
//   void check_values()              only if results depend on values that can be wrong: checks
//                                    them, and waits for a device that has them
//   save(), backward()               only if it has a gradient: what a recorded call keeps, and the
//                                    gradients of its tensors
//   constant_outputs()               only if some outputs have no gradient: their indices; integers
//                                    never have one
//   bool differentiable()            only if some calls have no gradient: whether this one has
//   operands()                       only if some tensors never have one: those that do
//   takes_int64                      only if it reads indices of 64 bits itself
//   lacks_defaults(), with_defaults()  only if a default depends on other arguments: whether this
//                                    call lacks any, and the call that has them
// Each backend adds one function `compute(const Op&, Outputs&)`. NPU, CPU and Meta share
// check_and_allocate: it uses symbolic sizes and allocates with the options of the inputs.
// check_values is called in the checked mode alone (core/value_checks.h), and defined beside the
// CPU kernel, which makes most of its checks in every call.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/tensor_checks.h"
#include "core/value_checks.h"
#include "dispatch/arguments.h"
#include "dispatch/outputs.h"

namespace torch {
class Library;
}

namespace ascend_attn {

// The overload that writes to tensors of the caller.
inline constexpr const char* kOut = "out";

// Returns the name of the argument at a position of the schema. The outputs follow the arguments,
// as in the `out=` overload.
const std::string& argument_name(const char* op, size_t position);
const std::string& output_name(const char* op, size_t index);
// Returns "query", or "local_out[2]" for an element of a list.
std::string place_name(const char* op, Place place);
// Returns the position of a named argument in the schema.
size_t argument_position(const char* op, const char* name);

[[noreturn]] void raise_no_tensor(const char* op, Place place, const at::Tensor& tensor);

// Rejects None for required tensors, which torch passes as an undefined tensor, tensors whose
// memory was freed, and lengths that cannot be read.
template <typename Call>
void check_tensors_given(const Call& call) {
  const at::Tensor* query = nullptr;  // or whatever comes first
  for_each_tensor(call, [&](const at::Tensor& tensor, Place place) {
    if (!tensor.defined() || !has_memory(tensor)) [[unlikely]] {
      raise_no_tensor(Call::name, place, tensor);
    }
    query = query ? query : &tensor;
  });
  for_each_lengths(call, [&](const Lengths& lengths, size_t position) {
    if (!are_readable(lengths, *query)) [[unlikely]] {
      raise_not_readable(Call::name, argument_name(Call::name, position), *lengths, *query);
    }
  });
}

// A call of the `out=` overload.
template <typename Op>
struct OutCall {
  static constexpr const char* name = Op::name;
  using Outputs = typename Op::Outputs;

  const Op& op;
  std::array<const at::Tensor*, std::tuple_size_v<Outputs>> outputs;

  OutputSource source() const { return {name, outputs.data()}; }
  Outputs written() const {
    return std::apply([](const auto*... output) { return Outputs(*output...); }, outputs);
  }
};

// Visits the arguments, and then the outputs.
template <typename Op, typename Predicate>
bool any_tensor(const OutCall<Op>& call, const Predicate& predicate) {
  size_t position = kArgumentCount<Op>;
  const auto any = [&](const auto*... output) {
    return (predicate(*output, Place{position++}) || ...);
  };
  return any_tensor(call.op, predicate) || std::apply(any, call.outputs);
}

template <typename Op, typename Visitor>
void for_each_lengths(const OutCall<Op>& call, const Visitor& visit) {
  for_each_lengths(call.op, visit);
}

// Checks that no argument of a call shares memory with what the call writes.
template <typename Op>
void check_outputs_apart(const OutCall<Op>& call) {
  const WrittenMemory written(Op::name, call.outputs.data(), call.outputs.size());
  for_each_tensor(
      call.op, [&](const at::Tensor& tensor, Place place) { written.check_apart(place, tensor); });
}

// One overload of an operator in the dispatcher. The templates of torch that pass its arguments are
// large: csrc/library.cpp instantiates them, once (dispatch/overload.h).
template <typename Op, typename Signature = SignatureOf<Op>>
struct Overload;
template <typename Op, typename Outputs, typename... Parameters>
struct Overload<Op, Outputs(Parameters...)> {
  static Outputs call(Parameters... parameters);
  static void register_kernel(torch::Library& library, Outputs (*kernel)(Parameters...));
};
template <typename Op>
using OutOverload = Overload<Op, OutSignatureOf<Op>>;

// Call an operator through the dispatcher.
template <typename Op>
typename Op::Outputs call(const Op& op) {
  return std::apply(&Overload<Op>::call, arguments_of(op));
}
template <typename Op>
typename Op::Outputs call(const OutCall<Op>& call) {
  const auto outputs =
      std::apply([](const auto*... output) { return std::tie(*output...); }, call.outputs);
  return std::apply(&OutOverload<Op>::call, std::tuple_cat(arguments_of(call.op), outputs));
}

// Makes a kernel for the dispatcher of a function of the operator's struct, and of the parameters
// that an overload has behind those of the operator.
template <typename Op, auto function, typename Signature = SignatureOf<Op>>
struct DispatcherKernel;
template <typename Op, auto function, typename Outputs, typename... Parameters>
struct DispatcherKernel<Op, function, Outputs(Parameters...)> {
  template <typename... More>
  static auto call(Parameters... parameters, More... more) {
    const Borrowed<Op> op(parameters...);
    return function(*op, more...);
  }
};

// Registers `Outputs function(const Op&)` for the key of `library`.
template <typename Op, auto function>
void register_function(torch::Library& library) {
  Overload<Op>::register_kernel(library, &DispatcherKernel<Op, function>::template call<>);
}

// Registers `Outputs function(const OutCall<Op>&)` for the key of `library`.
template <typename Op, auto function>
void register_out_function(torch::Library& library) {
  constexpr auto on_call = [](const Op& op, const auto&... outputs) {
    return function(OutCall<Op>{op, {&outputs...}});
  };
  [&]<typename... Tensors>(std::type_identity<std::tuple<Tensors...>>) {
    OutOverload<Op>::register_kernel(
        library, &DispatcherKernel<Op, on_call>::template call<const Tensors&...>);
  }(std::type_identity<typename Op::Outputs>());
}

// Calls `function` with a call that has all its defaults.
template <typename Op, typename Function>
auto with_defaults(const Op& op, const Function& function) {
  if constexpr (requires { op.with_defaults(); }) {
    if (op.lacks_defaults()) {
      return function(op.with_defaults());
    }
  }
  return function(op);
}

// Calls `compute` with indices, tables and residuals in int32.
template <typename Op, auto compute>
void compute_in_int32(const Op& op, typename Op::Outputs& outputs) {
  const auto is_wide = []<typename Field>(const Field& field) {
    if constexpr (std::same_as<Field, at::Tensor>) {
      return field.scalar_type() == at::kLong;
    } else if constexpr (std::same_as<Field, std::optional<at::Tensor>>) {
      return field && field->scalar_type() == at::kLong;
    } else {
      return false;
    }
  };
  const bool wide =
      std::apply([&](const auto&... field) { return (is_wide(field) || ...); }, arguments_of(op));
  if (!wide || requires { Op::takes_int64; }) [[likely]] {
    compute(op, outputs);
    return;
  }
  const auto narrow = [&]<typename Field>(const Field& field) -> Field {
    if constexpr (std::same_as<Field, at::Tensor>) {
      return as_int32(field);
    } else if constexpr (std::same_as<Field, std::optional<at::Tensor>>) {
      return field ? Field(as_int32(*field)) : field;
    } else {
      return field;
    }
  };
  compute(map_fields(op, narrow), outputs);
}

// Computes, in the checked mode after checking the values of a call on the CPU. The NPU's kernels
// check them before they launch.
template <typename Op, auto compute>
void compute_checked(const Op& op, typename Op::Outputs& outputs) {
  if constexpr (requires { op.check_values(); }) {
    if (checks_values() && std::get<0>(arguments_of(op)).is_cpu()) [[unlikely]] {
      op.check_values();
    }
  }
  compute(op, outputs);
}

template <typename Op, auto compute>
typename Op::Outputs run(const Op& given) {
  check_tensors_given(given);
  return with_defaults(given, [](const Op& op) {
    auto outputs = op.check_and_allocate();
    compute_in_int32<Op, &compute_checked<Op, compute>>(op, outputs);
    return outputs;
  });
}
template <typename Op, auto compute>
typename Op::Outputs run_into(const OutCall<Op>& call) {
  check_tensors_given(call);
  return with_defaults(call.op, [&](const Op& op) {
    auto outputs = op.check_and_allocate(call.source());
    check_outputs_apart(call);
    compute_in_int32<Op, &compute_checked<Op, compute>>(op, outputs);
    return outputs;
  });
}

// Registers the kernel of one operator, in all its overloads, for the backend of `library`.
template <typename Op, auto compute>
void register_kernel(torch::Library& library) {
  register_function<Op, &run<Op, compute>>(library);
  if constexpr (HasOutOverload<Op>) {
    register_out_function<Op, &run_into<Op, compute>>(library);
  }
}

}  // namespace ascend_attn
