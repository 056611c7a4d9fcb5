// Defines the operators of torch.ops.ascend. csrc/ops/<operator>.h declares each one's schema and
// arguments; its kernels register themselves in csrc/{cpu,npu}/<operator>.cpp and csrc/autograd.
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

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

template <typename Op>
void define(torch::Library& library) {
  instantiate<Overload<Op>>();
  library.def((Op::name + std::string(Op::schema)).c_str());
  if constexpr (HasOutOverload<Op>) {
    instantiate<OutOverload<Op>>();
    library.def(
        c10::str(Op::name, ".", kOut, out_schema(static_cast<const char*>(Op::schema))).c_str());
  }
}

// Fake tensors need the checks and the outputs, and nothing else.
template <typename Op>
void register_meta(torch::Library& library) {
  register_kernel<Op, no_values<Op>>(library);
}

TORCH_LIBRARY(ascend, m) {
  Operators::for_each([&]<typename Op>() { define<Op>(m); });
  PrivateOperators::for_each([&]<typename Op>() { define<Op>(m); });
}

TORCH_LIBRARY_IMPL(ascend, Meta, m) {
  Operators::for_each([&]<typename Op>() { register_meta<Op>(m); });
  PrivateOperators::for_each([&]<typename Op>() { register_meta<Op>(m); });
}

// Sets the limits of the calling thread, and returns what they were; nullopt switches them off.
int64_t set_thread_limits(std::optional<int64_t> override) {
  return std::exchange(limits_of_thread().override,
                       override.value_or(limits_override_for(std::nullopt)));
}

// Not an operator of the library: a simulated NPU computes with the CPU kernels, after the NPU
// kernel has checked the limits, and reaches this library through the dispatcher alone.
TORCH_LIBRARY(ascend_attn_ops, m) {
  m.def("_set_thread_limits(int? override) -> int", &set_thread_limits);
}

}  // namespace
}  // namespace ascend_attn
