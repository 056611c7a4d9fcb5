// Checks of a single tensor argument, and allocation of outputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string>
#include <string_view>

#include "core/symbolic.h"

namespace ascend_attn {

// The index of a tensor that is an argument by itself.
inline constexpr int64_t kNotInList = -1;
// Returns "local_out[2]" for an element of a list, otherwise the name.
std::string element_name(std::string_view name, int64_t index);

// A tensor argument, or an element of a list, and its name in error messages.
struct NamedTensor {
  std::string_view name;
  const at::Tensor& tensor;
  int64_t index = kNotInList;

  // Made for messages alone: a call checks every element.
  std::string text() const { return element_name(name, index); }
};
struct NamedOptionalTensor {
  std::string_view name;
  const std::optional<at::Tensor>& tensor;
};

// Expects a finite number of float32, in which the kernels have it.
void check_scale_value(std::string_view op, double scale_value);
// Expects a gradient of out, of the softmax statistics, or of both.
void check_some_gradient(std::string_view op, NamedOptionalTensor of_out,
                         NamedOptionalTensor of_statistics);
// Expects float16, bfloat16, float32 or float64; also accepts int8 if `or_int8` is set.
void check_attention_dtype(std::string_view op, NamedTensor argument, bool or_int8 = false);

// Raise the errors of the checks below, which are inline because every call makes dozens of them.
[[noreturn]] void raise_device(std::string_view op, NamedTensor argument, NamedTensor like);
[[noreturn]] void raise_dtype(std::string_view op, NamedTensor argument, at::ScalarType expected,
                              const NamedTensor* like = nullptr);
[[noreturn]] void raise_shape(std::string_view op, NamedTensor argument,
                              c10::SymIntArrayRef expected, std::string_view meaning);

// Expect the device, or the dtype, of `like`.
inline void check_device(std::string_view op, NamedTensor argument, NamedTensor like) {
  if (argument.tensor.device() != like.tensor.device()) [[unlikely]] {
    raise_device(op, argument, like);
  }
}
inline void check_dtype(std::string_view op, NamedTensor argument, NamedTensor like) {
  if (argument.tensor.dtype() != like.tensor.dtype()) [[unlikely]] {
    raise_dtype(op, argument, like.tensor.scalar_type(), &like);
  }
}
inline void check_dtype(std::string_view op, NamedTensor argument, at::ScalarType dtype) {
  if (argument.tensor.scalar_type() != dtype) [[unlikely]] {
    raise_dtype(op, argument, dtype);
  }
}

// Expects int32 or int64.
inline void check_integers(std::string_view op, NamedTensor argument) {
  if (const auto dtype = argument.tensor.scalar_type(); dtype != at::kInt && dtype != at::kLong)
      [[unlikely]] {
    raise_dtype(op, argument, at::kInt);
  }
}
// Returns integers in int32, in which kernels and devices take them. Numbers that do
// not fit become the nearest ones that do, which no index is.
at::Tensor as_int32(const at::Tensor& integers);

// Whether the storage holds all elements. FSDP, and untyped_storage().resize_(), free the memory of
// tensors that keep their sizes.
bool has_memory(const at::Tensor& tensor);

// Returns the tensor itself, or a copy for which it waits if a device has it.
inline at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : tensor.cpu();
}

bool has_shape(const at::Tensor& tensor, c10::SymIntArrayRef expected);
// The same of a tensor that is broadcast to these sizes: its axes may be 1.
bool broadcasts_to(const at::Tensor& tensor, c10::SymIntArrayRef expected);
// The same for a rule: symbolic sizes are assumed to fit.
inline bool fits_shape(const at::Tensor& tensor, c10::SymIntArrayRef expected) {
  const auto sizes = tensor.sym_sizes();
  bool fits = sizes.size() == expected.size();
  for (size_t axis = 0; fits && axis < sizes.size(); ++axis) {
    fits = same(sizes[axis], expected[axis]);
  }
  return fits;
}
// `meaning` names the axes: "(B, S1, N, D)".
inline void check_shape(std::string_view op, NamedTensor argument, c10::SymIntArrayRef expected,
                        std::string_view meaning) {
  if (!fits_shape(argument.tensor, expected)) [[unlikely]] {
    raise_shape(op, argument, expected, meaning);
  }
}

// Allocates a contiguous, uninitialised tensor.
at::Tensor new_tensor(c10::SymIntArrayRef sizes, const at::TensorOptions& options);
// Allocates a contiguous tensor with the sizes of `like`, whatever the strides of `like` are.
at::Tensor new_like(const at::Tensor& like);

// torch_npu's allocation function, which costs the host less than at::empty. Set by `_npu`.
using Allocation = at::Tensor (*)(at::IntArrayRef sizes, const at::TensorOptions& options);
void set_npu_allocation(Allocation allocation);

// Softmax statistics are fp32, or fp64 for fp64 inputs.
inline at::ScalarType statistics_dtype(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace ascend_attn
