#include "ops/tensor_argument.h"

#include <ATen/ops/empty.h>

#include <atomic>

#include "ops/error.h"
#include "ops/symbolic.h"

namespace ascend_attn {
namespace {

std::atomic<Allocation> npu_allocation = nullptr;

}  // namespace

void check_attention_dtype(std::string_view op, TensorArgument argument, bool or_int8) {
  const auto dtype = argument.tensor.scalar_type();
  check_type(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                 dtype == at::kDouble || (or_int8 && dtype == at::kChar),
             op, argument.name, "expected dtype ", or_int8 ? "int8, " : "",
             "float16, bfloat16, float32 or float64, got ", dtype_name(dtype));
}

void check_device(std::string_view op, TensorArgument argument, TensorArgument like) {
  check_value(argument.tensor.device() == like.tensor.device(), op, argument.name,
              "expected device ", like.tensor.device(), " (", like.name, "'s), got ",
              argument.tensor.device());
}

void check_dtype(std::string_view op, TensorArgument argument, TensorArgument like) {
  check_type(argument.tensor.scalar_type() == like.tensor.scalar_type(), op, argument.name,
             "expected dtype ", dtype_name(like.tensor.scalar_type()), " (", like.name, "'s), got ",
             dtype_name(argument.tensor.scalar_type()));
}

void check_dtype(std::string_view op, TensorArgument argument, at::ScalarType dtype) {
  check_type(argument.tensor.scalar_type() == dtype, op, argument.name, "expected dtype ",
             dtype_name(dtype), ", got ", dtype_name(argument.tensor.scalar_type()));
}

bool has_shape(const at::Tensor& tensor, c10::SymIntArrayRef expected) {
  const auto sizes = tensor.sym_sizes();
  bool same = sizes.size() == expected.size();
  for (size_t axis = 0; same && axis < sizes.size(); ++axis) {
    same = sizes[axis].sym_eq(expected[axis]).guard_bool(__FILE__, __LINE__);
  }
  return same;
}

void check_shape(std::string_view op, TensorArgument argument, c10::SymIntArrayRef expected,
                 std::string_view meaning) {
  const auto sizes = argument.tensor.sym_sizes();
  bool fits = sizes.size() == expected.size();
  for (size_t axis = 0; fits && axis < sizes.size(); ++axis) {
    fits = same(sizes[axis], expected[axis]);
  }
  check_value(fits, op, argument.name, "expected shape ", meaning, " = ", expected, ", got ",
              sizes);
}

at::Tensor new_tensor(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  if (npu_allocation && options.device().is_privateuseone()) {
    if (const auto known = c10::asIntArrayRefSlowOpt(sizes)) {
      return npu_allocation(*known, options);
    }
  }
  return at::empty_symint(sizes, options);
}

at::Tensor new_like(const at::Tensor& like) { return new_tensor(like.sym_sizes(), like.options()); }

void set_npu_allocation(Allocation allocation) { npu_allocation = allocation; }

}  // namespace ascend_attn
