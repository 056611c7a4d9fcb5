// One line for tensors that no kernel reads, in place of torch's list of its backends.
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <string_view>

#include "core/error.h"
#include "dispatch/operator.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

// Returns "" for a tensor that the CPU or an NPU reads, and otherwise what it is.
std::string unread_kind(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "";
  }
  if (tensor.is_nested()) {
    return "a nested tensor";
  }
  if (tensor.is_quantized()) {
    return "a quantized tensor";
  }
  if (tensor.layout() != at::kStrided) {
    return c10::str("a tensor of layout ", tensor.layout());
  }
  const bool read = tensor.is_cpu() || tensor.is_privateuseone() || tensor.is_meta();
  return read ? "" : c10::str("a tensor on ", tensor.device());
}

void check_read(std::string_view op, const std::string& argument, const at::Tensor& tensor) {
  const auto kind = unread_kind(tensor);
  check_implemented(kind.empty(), op, argument,
                    "expected a dense tensor on the CPU or an NPU, got ", kind);
}

void refuse(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  constexpr std::string_view kNamespace = "ascend::";
  const auto& schema = handle.schema();
  const auto op = std::string_view(schema.name()).substr(kNamespace.size());
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = schema.arguments()[i].name();
    if (given[i].isTensor()) {
      check_read(op, argument, given[i].toTensor());
    } else if (given[i].isTensorList()) {
      const auto tensors = given[i].toTensorVector();
      for (size_t k = 0; k < tensors.size(); ++k) {
        check_read(op, c10::str(argument, "[", k, "]"), tensors[k]);
      }
    }
  }
  TORCH_INTERNAL_ASSERT(false, schema.name(), ": all tensors have kernels");
}

void refuse_all(torch::Library& library) {
  const auto add = [&]<typename Op>() {
    library.impl(Op::name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
    if constexpr (HasOutOverload<Op>) {
      library.impl(c10::str(Op::name, ".", kOut).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  };
  Operators::for_each(add);
  PrivateOperators::for_each(add);
}

TORCH_LIBRARY_IMPL(ascend, SparseCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, SparseCsrCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, MkldnnCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, QuantizedCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, NestedTensorCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, SparsePrivateUse1, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, SparseCsrPrivateUse1, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, QuantizedPrivateUse1, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, NestedTensorPrivateUse1, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, SparseMeta, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, SparseCsrMeta, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, QuantizedMeta, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, NestedTensorMeta, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, CUDA, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, XPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(ascend, MPS, m) { refuse_all(m); }

}  // namespace
}  // namespace ascend_attn
