#include "core/tensor_checks.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/error.h"
#include "core/huge_pages.h"

namespace ascend_attn {
namespace {

std::atomic<Allocation> npu_allocation = nullptr;

}  // namespace

std::string element_name(std::string_view name, int64_t index) {
  return index == kNotInList ? std::string(name) : c10::str(name, "[", index, "]");
}

void check_scale_value(std::string_view op, double scale_value) {
  check_value(std::isfinite(static_cast<float>(scale_value)), op, "scale_value",
              "expected a finite number of float32, got ", scale_value);
}

void check_some_gradient(std::string_view op, NamedOptionalTensor of_out,
                         NamedOptionalTensor of_statistics) {
  check_present(of_out.tensor || of_statistics.tensor, op, of_out.name,
                "expected a tensor because ", of_statistics.name, " is None, got None");
}

void check_attention_dtype(std::string_view op, NamedTensor argument, bool or_int8) {
  const auto dtype = argument.tensor.scalar_type();
  const bool fits = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                    dtype == at::kDouble || (or_int8 && dtype == at::kChar);
  if (!fits) [[unlikely]] {
    raise(Violation::type, op, argument.text(),
          c10::str("expected dtype ", or_int8 ? "int8, " : "",
                   "float16, bfloat16, float32 or float64, got ", dtype_name(dtype)));
  }
}

void raise_device(std::string_view op, NamedTensor argument, NamedTensor like) {
  raise(Violation::value, op, argument.text(),
        c10::str("expected device ", like.tensor.device(), " (", like.text(), "'s), got ",
                 argument.tensor.device(), "; move it with .to(", like.text(), ".device)"));
}

void raise_dtype(std::string_view op, NamedTensor argument, at::ScalarType expected,
                 const NamedTensor* like) {
  const auto owner = like ? c10::str(" (", like->text(), "'s)") : std::string();
  raise(Violation::type, op, argument.text(),
        c10::str("expected dtype ", dtype_name(expected), expected == at::kInt ? " or int64" : "",
                 owner, ", got ", dtype_name(argument.tensor.scalar_type())));
}

void raise_shape(std::string_view op, NamedTensor argument, c10::SymIntArrayRef expected,
                 std::string_view meaning) {
  raise(
      Violation::value, op, argument.text(),
      c10::str("expected shape ", meaning, " = ", expected, ", got ", argument.tensor.sym_sizes()));
}

at::Tensor as_int32(const at::Tensor& integers) {
  using Limits = std::numeric_limits<int32_t>;
  const bool narrow = integers.scalar_type() != at::kLong || integers.is_meta();
  return narrow ? integers : integers.clamp(Limits::min(), Limits::max()).to(at::kInt);
}

bool has_memory(const at::Tensor& tensor) {
  if (tensor.is_nested()) {
    return false;
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || tensor.is_meta() || impl->has_symbolic_sizes_strides() ||
      tensor.layout() != at::kStrided || tensor.numel() == 0) {
    return true;
  }
  int64_t last = impl->storage_offset();
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    last += (sizes[axis] - 1) * strides[axis];
  }
  const auto bytes = static_cast<size_t>(last + 1) * impl->itemsize();
  return bytes <= impl->unsafe_storage().nbytes();
}

bool has_shape(const at::Tensor& tensor, c10::SymIntArrayRef expected) {
  const auto sizes = tensor.sym_sizes();
  bool same = sizes.size() == expected.size();
  for (size_t axis = 0; same && axis < sizes.size(); ++axis) {
    same = may_equal(sizes[axis], expected[axis]);
  }
  return same;
}

bool broadcasts_to(const at::Tensor& tensor, c10::SymIntArrayRef expected) {
  const auto sizes = tensor.sym_sizes();
  bool fits = sizes.size() == expected.size();
  for (size_t axis = 0; fits && axis < sizes.size(); ++axis) {
    fits = may_equal(sizes[axis], 1) || may_equal(sizes[axis], expected[axis]);
  }
  return fits;
}

at::Tensor new_tensor(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  if (const Allocation allocate = npu_allocation; allocate && options.device().is_privateuseone()) {
    if (const auto known = c10::asIntArrayRefSlowOpt(sizes)) {
      return allocate(*known, options);
    }
  }
  // Outputs are dense even if the options are those of a sparse tensor, which every backend
  // refuses.
  auto tensor = at::empty_symint(sizes, options.layout(at::kStrided));
  // Not is_cpu(), which is true of fake tensors too.
  if (tensor.key_set().has_backend(c10::BackendComponent::CPUBit)) {
    prefer_huge_pages(tensor.data_ptr(), tensor.nbytes());
  }
  return tensor;
}

at::Tensor new_like(const at::Tensor& like) { return new_tensor(like.sym_sizes(), like.options()); }

void set_npu_allocation(Allocation allocation) { npu_allocation = allocation; }

}  // namespace ascend_attn
