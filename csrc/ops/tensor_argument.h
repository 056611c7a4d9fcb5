// Rules about one tensor argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string_view>

namespace ascend_attn {

// An argument and the name that messages give it.
struct TensorArgument {
  const char* name;
  const at::Tensor& tensor;
};
struct OptionalTensorArgument {
  const char* name;
  const std::optional<at::Tensor>& tensor;
};

// float16, bfloat16, float32 or float64.
void check_attention_dtype(std::string_view op, TensorArgument argument);
// The device, or the dtype, of `like`.
void check_device(std::string_view op, TensorArgument argument, TensorArgument like);
void check_dtype(std::string_view op, TensorArgument argument, TensorArgument like);
void check_dtype(std::string_view op, TensorArgument argument, at::ScalarType dtype);

bool has_shape(const at::Tensor& tensor, c10::SymIntArrayRef expected);
// `meaning` names the axes: "(B, S1, N, D)".
void check_shape(std::string_view op, TensorArgument argument, c10::SymIntArrayRef expected,
                 std::string_view meaning);

// Not initialised. Dense, whatever the strides of `like`.
at::Tensor new_like(const at::Tensor& like);

// Softmax statistics are fp32, and fp64 beside fp64 inputs.
inline at::ScalarType statistics_dtype(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace ascend_attn
