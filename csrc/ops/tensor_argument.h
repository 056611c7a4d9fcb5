// An argument and the name that messages give it, and the rules that any operator may ask of one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string_view>

namespace ascend_attn {

struct TensorArgument {
  const char* name;
  const at::Tensor& tensor;
};
struct OptionalTensorArgument {
  const char* name;
  const std::optional<at::Tensor>& tensor;
};

// The device, or the dtype, of `other`.
void check_same_device(std::string_view op, TensorArgument argument, TensorArgument other);
void check_same_dtype(std::string_view op, TensorArgument argument, TensorArgument other);
// `meaning` names the axes: "(T, N, D)".
void check_shape(std::string_view op, TensorArgument argument, c10::SymIntArrayRef expected,
                 std::string_view meaning);

}  // namespace ascend_attn
