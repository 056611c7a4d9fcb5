// Defines the operators of torch.ops.ascend. csrc/ops/<operator>.h declares each one's schema and
// arguments; its kernels register themselves in csrc/{cpu,npu}/<operator>.cpp and csrc/autograd.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/device_in_force.h"
#include "dispatch/overload.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

template <typename Op>
void no_values(const Op&, typename Op::Outputs&) {}

// Returns the schema of the `out=` overload: what "(Tensor x) -> (Tensor y, Tensor z)" returns, it
// takes as keyword arguments as well, "(Tensor x, *, Tensor(a!) y, Tensor(b!) z) -> (Tensor(a!) y,
// Tensor(b!) z)".
std::string out_schema(std::string_view schema) {
  constexpr std::string_view kArrow = ") -> ";
  constexpr std::string_view kTensor = "Tensor";
  const auto end = schema.find(kArrow);
  const auto arguments = schema.substr(0, end);
  std::string outputs(schema.substr(end + kArrow.size()));
  std::erase_if(outputs, [](char character) { return character == '(' || character == ')'; });
  char alias = 'a';
  for (auto at = outputs.find(kTensor); at != outputs.npos; at = outputs.find(kTensor, at)) {
    at += kTensor.size();
    outputs.insert(at, {'(', alias++, '!', ')'});
  }
  const bool has_keywords = arguments.find(" *, ") != arguments.npos;
  return c10::str(arguments, has_keywords ? ", " : ", *, ", outputs, ") -> (", outputs, ")");
}

template <typename Overload>
void instantiate() {
  [[maybe_unused]] constexpr std::pair functions{&Overload::call, &Overload::register_kernel};
}

// Returns a tensor of lengths on the host. A trace, which may have symbols for them, records how it
// is made.
std::optional<at::Tensor> tensor_of(at::OptionalSymIntArrayRef list) {
  if (!list) {
    return std::nullopt;
  }
  const auto known = c10::asIntArrayRefSlowOpt(*list);
  if (known && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return Lengths(known->vec());
  }
  std::vector<at::Tensor> lengths{at::empty({0}, at::kLong)};
  for (const auto& length : *list) {
    lengths.push_back(at::full({1}, at::Scalar(length), at::kLong));
  }
  return at::cat(lengths);
}

// The overload `list`: with lists in place of tensors of lengths.
template <typename Op, typename Fields = ArgumentsOf<Op>>
struct ListOverload;
template <typename Op, typename... Fields>
struct ListOverload<Op, std::tuple<const Fields&...>> {
  template <typename Field>
  using Parameter = std::conditional_t<std::is_same_v<Field, Lengths>, at::OptionalSymIntArrayRef,
                                       typename reflection::Parameter<Field>::type>;

  template <typename Field>
  static decltype(auto) converted(const Parameter<Field>& argument) {
    if constexpr (std::is_same_v<Field, Lengths>) {
      return tensor_of(argument);
    } else {
      return argument;
    }
  }
  static typename Op::Outputs call(Parameter<Fields>... arguments) {
    return Overload<Op>::call(converted<Fields>(arguments)...);
  }

  static std::string schema() {
    std::string text(static_cast<const char*>(Op::schema));
    for (const auto* lengths : {"actual_seq_lengths_query", "actual_seq_lengths_key", "prefix"}) {
      const std::string tensor = c10::str("Tensor? ", lengths, "=");
      if (const auto at = text.find(tensor); at != text.npos) {
        text.replace(at, tensor.size(), c10::str("SymInt[]? ", lengths, "="));
      }
    }
    return c10::str(Op::name, ".list", text);
  }
};

template <typename Op>
void define_schemas(torch::Library& library) {
  library.def((Op::name + std::string(Op::schema)).c_str());
  if constexpr (HasOutOverload<Op>) {
    library.def(
        c10::str(Op::name, ".", kOut, out_schema(static_cast<const char*>(Op::schema))).c_str());
  }
}

template <typename Op>
void define(torch::Library& library) {
  instantiate<Overload<Op>>();
  define_schemas<Op>(library);
  if constexpr (HasOutOverload<Op>) {
    instantiate<OutOverload<Op>>();
  }
  // torch.ops tries overloads in this order, and a list of integers also takes a tensor, by reading
  // it.
  if constexpr (kReadsLengths<Op>) {
    library.def(torch::schema(ListOverload<Op>::schema().c_str()), &ListOverload<Op>::call);
  }
}

template <typename Visitor>
void for_each_operator(const Visitor& visit) {
  Operators::for_each(visit);
  PrivateOperators::for_each(visit);
}

// Fake tensors need the checks and the outputs, and nothing else.
template <typename Op>
void register_meta(torch::Library& library) {
  register_kernel<Op, no_values<Op>>(library);
}

TORCH_LIBRARY(ascend, m) {
  for_each_operator([&]<typename Op>() { define<Op>(m); });
}

TORCH_LIBRARY_IMPL(ascend, Meta, m) {
  for_each_operator([&]<typename Op>() {
    if constexpr (!kHasLengths<Op>) {
      register_meta<Op>(m);
    }
  });
}

// The Meta kernels of operators with lengths, which may be on the host beside tensors of a device.
// Fake tensors of two devices need a function of Python that calls these
// (python/ascend_attn_ops/_core/fake.py).
TORCH_LIBRARY(ascend_meta, m) {
  for_each_operator([&]<typename Op>() {
    if constexpr (kHasLengths<Op>) {
      define_schemas<Op>(m);
    }
  });
}

TORCH_LIBRARY_IMPL(ascend_meta, Meta, m) {
  for_each_operator([&]<typename Op>() {
    if constexpr (kHasLengths<Op>) {
      register_meta<Op>(m);
    }
  });
}

// Sets the limits of the calling thread, and returns what they were; nullopt switches them off.
int64_t set_thread_limits(std::optional<int64_t> override) {
  return set_override_of_thread(override.value_or(limits_override_for(std::nullopt)));
}

// Not an operator of the library: a simulated NPU computes with the CPU kernels, after the NPU
// kernel has checked the limits, and reaches this library through the dispatcher alone.
TORCH_LIBRARY(ascend_attn_ops, m) {
  m.def("_set_thread_limits(int? override) -> int", &set_thread_limits);
}

}  // namespace
}  // namespace ascend_attn
