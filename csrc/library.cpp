// Defines the operators of torch.ops.ascend. csrc/ops/<operator>.h declares each one's schema and
// arguments; its kernels register themselves in csrc/{cpu,npu,autograd}/<operator>.cpp.
#include <torch/library.h>

#include <string>

#include "ops/operators.h"

namespace ascend_attn {
namespace {

template <typename Op>
void no_values(const Op&, typename Op::Outputs&) {}

template <typename... Ops>
void define(OperatorList<Ops...>, torch::Library& library) {
  const auto add = [&](const std::string& name, const char* schema) {
    library.def((name + schema).c_str());
  };
  (add(Ops::name, Ops::schema), ...);
}

// Fake tensors need the checks and the outputs, and nothing else.
template <typename... Ops>
void register_meta(OperatorList<Ops...>, torch::Library& library) {
  (register_kernel<Ops, no_values<Ops>>(library), ...);
}

TORCH_LIBRARY(ascend, m) {
  define(Operators(), m);
  define(PrivateOperators(), m);
}

TORCH_LIBRARY_IMPL(ascend, Meta, m) {
  register_meta(Operators(), m);
  register_meta(PrivateOperators(), m);
}

}  // namespace
}  // namespace ascend_attn
